# Each target installs what it needs by package name, says so, and is safe to run
# again. KERNEL=path uses your own bzImage for Linux guests.

.PHONY: demo test bench fuzz audit build packages guests

CARGO ?= cargo
NEXTEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo yes)
STEP := resources/step

# Boots a stock kernel with --hv-tsc-page and prints what each clock costs.
demo: build
	target/release/clocklab clock-cost $(DEMO_ARGS)

build: packages
	$(STEP) "building vmm, clocklab and the guests" \
	  $(CARGO) build --quiet --release -p vmm -p guest-tests -p guests

guests:
	$(STEP) "building the bare-metal guests" $(CARGO) build --quiet --release -p guests

packages:
	resources/packages

# All tiers: units, bare-metal guests on /dev/kvm, guests in the lab.
test: packages build
	$(CARGO) fmt --all --check
	$(STEP) "clippy" $(CARGO) clippy --quiet --workspace --all-targets -- -D warnings
	$(STEP) "building the lab's programs" sh -c 'resources/program init && resources/program vmm' >/dev/null
	resources/kernel stable
	resources/tiers
ifeq ($(NEXTEST),yes)
	$(CARGO) nextest run --workspace
else
	RUST_TEST_THREADS=2 $(CARGO) test --workspace
endif
	$(STEP) "loom: every interleaving of the lock-free parts" \
	  env RUSTFLAGS="--cfg loom" $(CARGO) test --quiet --release --lib -p pvclock -p devices --target-dir target/loom loom

# Ratios, each pair measured in one run: vmm beside the bare KVM_RUN loop and,
# where one is installed, a peer VMM; then the arithmetic and lock-free parts.
bench: build
	target/release/clocklab bench $(BENCH_ARGS)
	target/release/clocklab start-up
	$(CARGO) bench --quiet -p pvclock -p vmm

# Every fuzz target, from the corpus that is kept in fuzz/corpora on.
FUZZ_SECONDS ?= 60
fuzz: packages
	@$(CARGO) fuzz --version >/dev/null 2>&1 || { \
	  echo "installing cargo-fuzz" >&2; $(CARGO) install --quiet --locked cargo-fuzz; }
	$(CARGO) run --quiet -p vmm --example fuzz_seeds -- fuzz/corpus
	for target in $$($(CARGO) +nightly fuzz list); do \
	  resources/fuzz $$target $(FUZZ_SECONDS) || exit 1; \
	done

# Licences, origins and known defects of every package that we build with. The
# database of defects is fetched by `cargo deny fetch db`, not by package name, and
# so only where somebody did that before.
ADVISORIES = $(or $(CARGO_HOME),$(HOME)/.cargo)/advisory-dbs
audit:
	@$(CARGO) deny --version >/dev/null 2>&1 || { \
	  echo "installing cargo-deny" >&2; $(CARGO) install --quiet --locked cargo-deny; }
	$(CARGO) deny --log-level error check licenses bans sources
	cd fuzz && $(CARGO) deny --log-level error --config ../deny.toml check licenses bans sources
	@if [ -d $(ADVISORIES) ]; then \
	  $(CARGO) deny --log-level error --offline check advisories; \
	else \
	  echo "advisories: NOT CHECKED: no database here; cargo deny fetch db gets it" >&2; \
	fi
