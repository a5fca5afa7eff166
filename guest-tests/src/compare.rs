//! `clocklab compare A.json B.json`: how two reports of one experiment differ.
//!
//! Rows are matched by what they are about (their text, their flags and their
//! parameters), in order where several are about the same. Each measure becomes a
//! ratio B/A with the widest spread that the reports allow: from B's lowest over
//! A's highest to B's highest over A's lowest.

use crate::report::{Plot, Report, Shape, figure};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What to compare.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The report to compare with
    #[arg(value_name = "A.json")]
    pub before: PathBuf,
    /// The report to compare
    #[arg(value_name = "B.json")]
    pub after: PathBuf,
}

type Row = Map<String, Value>;

/// Numbers that say what was measured, not what came out.
const PARAMETERS: &[&str] = &["cpus", "vcpus", "poll_us", "period_ns", "threads"];
/// Words of a field's name that make it a measure.
const UNITS: &[&str] = &["cycles", "ns", "us", "ms", "kib", "per", "ratio", "ppm", "ppb"];
/// Words of a field's name that make it an end of another one's spread.
const ENDS: &[&str] = &["min", "max"];

/// One measure of one pair of rows.
#[derive(Debug, PartialEq)]
struct Ratio {
    what: String,
    measure: String,
    before: f64,
    after: f64,
    /// Lowest and highest ratio that both spreads allow.
    spread: Option<(f64, f64)>,
}

impl Ratio {
    fn value(&self) -> f64 {
        self.after / self.before
    }

    /// Whether the spread excludes that nothing changed.
    fn differs(&self) -> Option<bool> {
        self.spread.map(|(low, high)| low > 1.0 || high < 1.0)
    }
}

/// Compares the two reports.
///
/// # Errors
/// One line: a file that is no report, two experiments, or nothing in common.
pub fn run(options: &Options) -> Result<Report, String> {
    let (a, b) = (read(&options.before)?, read(&options.after)?);
    let names = [&a, &b].map(|report| report["experiment"].as_str().unwrap_or_default());
    if names[0] != names[1] {
        return Err(format!("compare: A is of {}, B of {}: no common measure", names[0], names[1]));
    }
    let ratios = ratios(&rows(&a), &rows(&b));
    if ratios.is_empty() {
        return Err("compare: no row of A has its like in B".into());
    }
    let mut report = Report::new(
        "compare",
        format!(
            "B/A of every measure of {}; spread: B's lowest over A's highest to B's highest over \
             A's lowest",
            names[0]
        ),
    );
    for (name, path, from) in [("A", &options.before, &a), ("B", &options.after, &b)] {
        let host = &from["host"];
        report.notes.push(format!(
            "{name}: {}, revision {}, {} KVM, {}",
            path.display(),
            from["git"].as_str().unwrap_or("unknown"),
            host["kind"].as_str().unwrap_or("unknown"),
            host["cpu"].as_str().unwrap_or("unknown CPU"),
        ));
    }
    if a["host"] != b["host"] {
        report.notes.push("the hosts differ: a ratio is of both, host and program".into());
    }
    fill(&mut report, &ratios);
    Ok(report)
}

fn fill(report: &mut Report, ratios: &[Ratio]) {
    let header = ["what", "measure", "A", "B", "B/A", "spread", "differs"];
    report.table = vec![header.map(Into::into).to_vec()];
    for ratio in ratios {
        let (spread, differs) = match (ratio.spread, ratio.differs()) {
            (Some((low, high)), Some(differs)) => (
                format!("{}–{}", figure(low), figure(high)),
                if differs { "yes" } else { "within spread" },
            ),
            _ => ("–".into(), "–"),
        };
        report.table.push(vec![
            ratio.what.clone(),
            ratio.measure.clone(),
            figure(ratio.before),
            figure(ratio.after),
            figure(ratio.value()),
            spread,
            differs.into(),
        ]);
        report.rows.push(json!({
            "what": ratio.what,
            "measure": ratio.measure,
            "before": ratio.before,
            "after": ratio.after,
            "ratio": ratio.value(),
            "ratio_low": ratio.spread.map(|s| s.0),
            "ratio_high": ratio.spread.map(|s| s.1),
        }));
    }
    let bars = ratios.iter().map(|r| (format!("{} {}", r.what, r.measure), r.value()));
    report.plot = Some(Plot {
        title: "B over A".into(),
        x: "measure".into(),
        y: "ratio".into(),
        log_y: false,
        shape: Shape::Bars(bars.collect()),
    });
}

fn read(path: &Path) -> Result<Value, String> {
    let failed = |e: &dyn std::fmt::Display| format!("compare {}: {e}", path.display());
    let text = std::fs::read_to_string(path).map_err(|e| failed(&e))?;
    let report: Value = serde_json::from_str(&text).map_err(|e| failed(&e))?;
    if report["experiment"].is_string() && report["rows"].is_array() {
        return Ok(report);
    }
    Err(failed(&"not a report that clocklab --json wrote"))
}

fn rows(report: &Value) -> Vec<Row> {
    let rows = report["rows"].as_array().into_iter().flatten();
    rows.filter_map(|row| row.as_object().cloned()).collect()
}

/// What a row is about. The kind of host is told once, in the notes.
fn subject(row: &Row) -> String {
    let words = row.iter().filter_map(|(name, value)| match value {
        _ if name == "host_kind" => None,
        Value::String(text) => Some(text.clone()),
        Value::Bool(true) => Some(name.clone()),
        Value::Number(n) if PARAMETERS.contains(&name.as_str()) => Some(format!("{name}={n}")),
        _ => None,
    });
    words.collect::<Vec<_>>().join(" ")
}

fn has_word(name: &str, words: &[&str]) -> bool {
    name.split('_').any(|word| words.contains(&word))
}

fn is_measure(name: &str) -> bool {
    has_word(name, UNITS) && !has_word(name, ENDS) && !PARAMETERS.contains(&name)
}

/// The lowest and the highest value that a row has of a measure: its `min` and
/// `max`, or the least and the greatest of its `…_by_…`.
fn ends(row: &Row, measure: &str) -> Option<(f64, f64)> {
    let sibling = |end: &str| {
        let name = measure.contains("p50").then(|| measure.replace("p50", end))?;
        row.get(&name)?.as_f64()
    };
    let prefix = format!("{measure}_by_");
    let parts = || {
        let (_, parts) = row.iter().find(|(name, _)| name.starts_with(&prefix))?;
        let values: Vec<f64> = parts.as_array()?.iter().filter_map(Value::as_f64).collect();
        let low = values.iter().copied().reduce(f64::min)?;
        Some((low, values.into_iter().reduce(f64::max)?))
    };
    sibling("min").zip(sibling("max")).or_else(parts)
}

fn ratios(before: &[Row], after: &[Row]) -> Vec<Ratio> {
    let mut like: BTreeMap<String, Vec<&Row>> = BTreeMap::new();
    for row in after.iter().rev() {
        like.entry(subject(row)).or_default().push(row);
    }
    let mut ratios = Vec::new();
    for a in before {
        let what = subject(a);
        let Some(b) = like.get_mut(&what).and_then(Vec::pop) else { continue };
        for (measure, value) in a.iter().filter(|(name, _)| is_measure(name)) {
            let other = b.get(measure).and_then(Value::as_f64);
            let Some((before, after)) = value.as_f64().zip(other) else { continue };
            // Nothing over nothing is no ratio.
            if before == 0.0 {
                continue;
            }
            let spread = ends(a, measure)
                .zip(ends(b, measure))
                .filter(|((a_low, _), _)| *a_low > 0.0)
                .map(|((a_low, a_high), (b_low, b_high))| (b_low / a_high, b_high / a_low));
            ratios.push(Ratio {
                what: what.clone(),
                measure: measure.clone(),
                before,
                after,
                spread,
            });
        }
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(value: Value) -> Row {
        value.as_object().cloned().unwrap_or_default()
    }

    #[test]
    fn rows_are_matched_by_what_they_are_about() {
        let of = |clock, cpus, p50: f64| {
            row(json!({"clock": clock, "cpus": cpus, "cycles_p50": p50, "cycles_min": p50 * 0.9,
                       "cycles_max": p50 * 1.1, "samples": 1000, "host_kind": "software"}))
        };
        let a = [of("page", 1, 50.0), of("page", 2, 60.0), of("msr", 1, 3000.0)];
        let b = [of("msr", 1, 1500.0), of("page", 2, 60.0), of("hpet", 1, 1.0)];
        let found = ratios(&a, &b);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].what.as_str(), found[0].value()), ("page cpus=2", 1.0));
        assert_eq!(found[0].differs(), Some(false));
        assert_eq!((found[1].what.as_str(), found[1].value()), ("msr cpus=1", 0.5));
        assert_eq!(found[1].differs(), Some(true));
        let (low, high) = found[1].spread.unwrap();
        assert!((low - 0.45 / 1.1).abs() < 1e-9 && (high - 0.55 / 0.9).abs() < 1e-9);
    }

    #[test]
    fn a_spread_may_be_a_list_or_missing() {
        let a = [row(json!({"what": "x", "ns_p99": 10, "ns_p99_by_round": [8, 12], "ms": 5.0}))];
        let b = [row(json!({"what": "x", "ns_p99": 20, "ns_p99_by_round": [18, 24], "ms": 5.0}))];
        let found = ratios(&a, &b);
        assert_eq!(found[1].spread, Some((18.0 / 12.0, 24.0 / 8.0)));
        assert_eq!((found[0].measure.as_str(), found[0].spread), ("ms", None));
    }

    #[test]
    fn equal_rows_are_matched_in_order() {
        let of = |ms: f64| row(json!({"what": "x", "ms": ms}));
        let found = ratios(&[of(1.0), of(2.0)], &[of(10.0), of(20.0)]);
        assert_eq!(found.iter().map(Ratio::value).collect::<Vec<_>>(), [10.0, 10.0]);
    }

    #[test]
    fn two_experiments_have_no_ratio() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let before = write("a", r#"{"experiment":"x","rows":[{"what":"w","ms":2.0}]}"#);
        for (text, says) in [
            (r#"{"experiment":"y","rows":[]}"#, "no common measure"),
            (r#"{"experiment":"x","rows":[]}"#, "its like"),
            ("{}", "not a report"),
            ("", "compare"),
        ] {
            let after = write("b", text);
            let error = run(&Options { before: before.clone(), after }).unwrap_err();
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        }
        let report = run(&Options { before: before.clone(), after: before }).unwrap();
        assert_eq!(report.rows[0]["ratio"], 1.0);
        assert!(report.plot.unwrap().to_svg().unwrap().contains("<svg"));
    }
}
