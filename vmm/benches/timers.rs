//! What arming a timer costs where nobody has to be woken, and what settling who
//! serves it costs once.

use criterion::{Criterion, criterion_group, criterion_main};
use devices::deadlines::Deadlines;
use std::collections::BTreeSet;
use std::hint::black_box;
use vmm::host_cpus::{CpuList, HostCpu, HostCpus};
use vmm::housekeeping::{Manner, Plan};

/// 1024 CPUs of 8 nodes, one of which is the housekeeper of all others.
fn big_host() -> (HostCpus, Vec<Option<u32>>) {
    let cpu = |number| HostCpu { number, llc: number / 8 * 8, node: number / 128 };
    let cpus = (0..1024).map(cpu).collect();
    (HostCpus { cpus, set_apart: BTreeSet::new() }, (1..1024).map(Some).collect())
}

fn arm(c: &mut Criterion) {
    let (host, places) = big_host();
    let keeper = CpuList(vec![0]);
    let plan = Plan::new(&keeper, &places, &host, Manner::default());
    let slots = plan.slots();
    let (mut vcpu, mut deadline) = (0, 1_000_000);
    c.bench_function("arm: choose the thread and publish, 1 of 1024 CPUs keeps house", |b| {
        b.iter(|| {
            vcpu = (vcpu + 1) % slots.len();
            deadline += 1;
            slots[black_box(vcpu)].publish(Some(deadline));
        });
    });
    c.bench_function("once: settle who serves 1023 vCPUs", |b| {
        b.iter(|| Plan::new(&keeper, black_box(&places), &host, Manner::default()));
    });

    let deadlines = Deadlines::new(64);
    deadlines.publish(0, 10);
    deadlines.sleep();
    c.bench_function("publish: one slot, uncontended, the thread sleeps till earlier", |b| {
        b.iter(|| {
            deadline += 1;
            assert!(!deadlines.publish(black_box(7), deadline));
        });
    });
}

criterion_group!(benches, arm);
criterion_main!(benches);
