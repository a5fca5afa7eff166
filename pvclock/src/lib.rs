//! What time it is: the arithmetic and the state machines of a guest's clocks.
#![forbid(unsafe_code)]
