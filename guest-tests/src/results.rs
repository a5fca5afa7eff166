//! The `@result {json}` lines that guests print.

use serde_json::{Map, Value};

/// One result: a flat JSON object.
pub type Result = Map<String, Value>;

/// All results in a console's text, in order. The kernel's own lines, and what it
/// prints into the middle of a line, are passed over.
pub fn parse(console: &str) -> Vec<Result> {
    console
        .lines()
        .filter_map(|line| line.split_once("@result "))
        .filter_map(|(_, json)| {
            // A kernel message may follow on the same line.
            let mut values = serde_json::Deserializer::from_str(json).into_iter::<Result>();
            values.next()?.ok()
        })
        .collect()
}

/// The results whose field `key` is `value`.
pub fn select<'a>(
    results: &'a [Result],
    key: &'a str,
    value: &'a str,
) -> impl Iterator<Item = &'a Result> {
    results.iter().filter(move |r| r.get(key).and_then(Value::as_str) == Some(value))
}

/// A field as a number.
pub fn number(result: &Result, key: &str) -> Option<f64> {
    result.get(key)?.as_f64()
}

/// A field as text.
pub fn text<'a>(result: &'a Result, key: &str) -> Option<&'a str> {
    result.get(key)?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_found_among_other_words() {
        let console = "[    0.0] Linux\r\n@result {\"job\":\"a\",\"n\":1}\r\n\
                       [    1.0] x @result {\"job\":\"b\",\"n\":2.5}[    1.1] more\r\n\
                       @result {\"job\":\r\n";
        let results = parse(console);
        assert_eq!(results.len(), 2);
        let b: Vec<_> = select(&results, "job", "b").collect();
        assert_eq!(number(b[0], "n"), Some(2.5));
        assert_eq!(text(b[0], "job"), Some("b"));
    }
}
