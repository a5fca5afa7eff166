//! Results for the host: one `@result {json}` line each, in one write, because
//! the console is also the kernel's and an emulated serial port is slow.

use std::fmt::Write as _;
use std::io::Write as _;

/// One result, built field by field in the order given.
pub struct Result(String);

impl Result {
    /// A result of `job`.
    pub fn of(job: &str) -> Self {
        Self("{".into()).text("job", job)
    }

    /// Adds a string.
    pub fn text(mut self, name: &str, value: &str) -> Self {
        self.name(name);
        quote(&mut self.0, value);
        self
    }

    /// Adds an integer.
    pub fn count(mut self, name: &str, value: u64) -> Self {
        self.name(name);
        let _ = write!(self.0, "{value}");
        self
    }

    /// Adds a number to two decimals.
    pub fn real(mut self, name: &str, value: f64) -> Self {
        self.name(name);
        // JSON has no word for infinity.
        let _ =
            if value.is_finite() { write!(self.0, "{value:.2}") } else { write!(self.0, "null") };
        self
    }

    /// Adds a list of integers.
    pub fn counts(mut self, name: &str, values: &[u64]) -> Self {
        self.name(name);
        let list: Vec<String> = values.iter().map(u64::to_string).collect();
        let _ = write!(self.0, "[{}]", list.join(","));
        self
    }

    /// Adds a list of strings.
    pub fn texts<S: AsRef<str>>(mut self, name: &str, values: &[S]) -> Self {
        self.name(name);
        for (index, value) in values.iter().enumerate() {
            self.0.push(if index == 0 { '[' } else { ',' });
            quote(&mut self.0, value.as_ref());
        }
        self.0.push_str(if values.is_empty() { "[]" } else { "]" });
        self
    }

    /// Prints the result.
    pub fn print(self) {
        let line = format!("@result {}}}\n", self.0);
        let mut out = std::io::stdout();
        // Nobody is left to tell where the console cannot be written.
        let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
    }

    fn name(&mut self, name: &str) {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        quote(&mut self.0, name);
        self.0.push(':');
    }
}

/// Prints that `job` failed, and why.
pub fn error(job: &str, failure: &str) {
    Result::of(job).text("error", failure).print();
}

fn quote(out: &mut String, value: &str) {
    out.push('"');
    for c in value.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_json() {
        let result = Result::of("x")
            .count("n", 3)
            .real("r", 1.0 / 3.0)
            .real("inf", f64::INFINITY)
            .counts("c", &[1, 2])
            .texts("t", &["a\"b", "\n"])
            .texts::<&str>("e", &[]);
        assert_eq!(
            result.0,
            r#"{"job":"x","n":3,"r":0.33,"inf":null,"c":[1,2],"t":["a\"b","\u000a"],"e":[]"#
        );
    }
}
