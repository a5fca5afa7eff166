//! Progress for people: which step runs, and for how long.

use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Longest time without a word to the user.
pub const SILENCE: Duration = Duration::from_secs(4);

/// Says which step runs, and every few seconds for how long.
pub struct Progress {
    speak: bool,
    name: String,
    since: Instant,
    last_word: Instant,
}

impl Progress {
    /// Speaks on standard error if `speak`.
    #[must_use]
    pub fn new(speak: bool) -> Self {
        let now = Instant::now();
        Self { speak, name: String::new(), since: now, last_word: now }
    }

    /// Starts a step and says its name.
    pub fn next(&mut self, name: &str) {
        self.done();
        self.name = name.to_owned();
        self.since = Instant::now();
        self.say(name);
    }

    /// Ends the running step; says its length if that was long.
    pub fn done(&mut self) {
        if self.since.elapsed() >= SILENCE {
            self.say(&format!("{}: done in {:.1} s", self.name, self.seconds()));
        }
    }

    /// The user has just seen something else happen.
    pub fn heard(&mut self) {
        self.last_word = Instant::now();
    }

    /// Says how long the step has taken, unless something was said lately. To be
    /// called at least every [`SILENCE`].
    pub fn remind(&mut self) {
        if self.last_word.elapsed() >= SILENCE {
            self.say(&format!("{}: {:.0} s", self.name, self.seconds()));
        }
    }

    /// The running step.
    #[must_use]
    pub fn step(&self) -> &str {
        &self.name
    }

    fn seconds(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }

    fn say(&mut self, words: &str) {
        if self.speak {
            // A closed standard error must not end the run.
            let _ = writeln!(io::stderr(), "{words}");
        }
        self.last_word = Instant::now();
    }
}
