//! What the guest can poke.
#![forbid(unsafe_code)]
