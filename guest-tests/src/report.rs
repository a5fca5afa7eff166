//! What an experiment found: one value, shown as a table, JSON, a plot or a page.

use crate::host::Host;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

mod html;
mod plot;

pub use plot::{Plot, Series, Shape};

/// The findings of one experiment.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the subcommand.
    pub experiment: &'static str,
    /// Revision of this program, from the repository it was built in.
    pub git: &'static str,
    /// What it ran on.
    pub host: Host,
    /// The command that repeats it.
    pub command: String,
    /// How the figures came about, in a sentence or two.
    pub method: String,
    /// The findings, one object a row.
    pub rows: Vec<Value>,
    /// What the document that the experiment repeats says.
    pub document: Value,
    /// What a reader must know before using the figures.
    pub notes: Vec<String>,
    /// Rows for people: the header first.
    #[serde(skip)]
    pub table: Vec<Vec<String>>,
    /// The picture, if there is one.
    #[serde(skip)]
    pub plot: Option<Plot>,
}

/// Where a report goes besides standard output.
#[derive(Debug, Clone, clap::Args)]
pub struct Outputs {
    /// Write the report as JSON
    #[arg(long, value_name = "FILE", global = true)]
    pub json: Option<PathBuf>,
    /// Draw the plot
    #[arg(long, value_name = "FILE", global = true)]
    pub svg: Option<PathBuf>,
    /// Write one self-contained page with table, plot and method
    #[arg(long, value_name = "FILE", global = true)]
    pub html: Option<PathBuf>,
}

impl Report {
    /// An empty report of this run.
    #[must_use]
    pub fn new(experiment: &'static str, method: impl Into<String>) -> Self {
        Self {
            experiment,
            git: env!("GIT_REVISION"),
            host: Host::here(),
            command: command_line(),
            method: method.into(),
            rows: Vec::new(),
            document: Value::Null,
            notes: Vec::new(),
            table: Vec::new(),
            plot: None,
        }
    }

    /// The table and the notes, for a terminal.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        let mut rows = self.table.iter();
        if let Some(header) = rows.next() {
            table.set_header(header);
        }
        table.add_rows(rows);
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut text = format!("{table}\n\nmethod: {}\n", self.method);
        let host = &self.host;
        text += &format!(
            "host:   {} KVM, {}, {} CPUs, Linux {}\n",
            host.kind, host.cpu, host.cpus, host.kernel
        );
        for note in &self.notes {
            text += &format!("note:   {note}\n");
        }
        text
    }

    /// Prints the table and writes what `outputs` asks for.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn deliver(&self, outputs: &Outputs) -> Result<(), String> {
        // A closed pipe loses the table, not the files.
        let _ = writeln!(io::stdout(), "{}", self.to_text());
        if let Some(path) = &outputs.json {
            let json = serde_json::to_string_pretty(self).map_err(|e| e.to_string())?;
            write("--json", path, &(json + "\n"))?;
        }
        if let Some(path) = &outputs.html {
            write("--html", path, &html::page(self)?)?;
        }
        // Last: what can be written is, also where there is no plot.
        if let Some(path) = &outputs.svg {
            let plot = self.plot.as_ref().ok_or("--svg: this experiment draws no plot")?;
            write("--svg", path, &plot.to_svg()?)?;
        }
        Ok(())
    }
}

fn write(flag: &str, path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|e| format!("{flag} {}: {e}", path.display()))
}

/// This process's command line, without the directories of the program.
fn command_line() -> String {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    std::iter::once(name)
        .chain(words.map(|word| if word.contains(' ') { format!("'{word}'") } else { word }))
        .collect::<Vec<_>>()
        .join(" ")
}

/// A number for people: three or four digits that mean something.
#[must_use]
pub fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.01 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    pub(super) fn sample() -> Report {
        let mut report = Report::new("sample", "counted <twice>");
        report.rows.push(json!({"clock": "page", "cycles_p50": 49}));
        report.table = vec![
            vec!["clock".into(), "where".into(), "cycles".into()],
            vec!["page".into(), "user".into(), "49".into()],
        ];
        report.notes.push("a & b".into());
        report.plot = Some(Plot {
            title: "cost".into(),
            x: "clock".into(),
            y: "cycles".into(),
            log_y: true,
            shape: Shape::Bars(vec![("page".into(), 49.0), ("msr".into(), 3361.0)]),
        });
        report
    }

    #[test]
    fn the_text_has_table_method_host_and_notes() {
        let text = sample().to_text();
        for part in ["| page", "counted", "KVM", "a & b"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn files_are_written_and_a_bad_path_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| Some(directory.path().join(name));
        let outputs = Outputs { json: at("a.json"), svg: at("a.svg"), html: at("a.html") };
        sample().deliver(&outputs).unwrap();
        let json: Value =
            serde_json::from_slice(&fs::read(outputs.json.as_ref().unwrap()).unwrap()).unwrap();
        assert_eq!(json["experiment"], "sample");
        assert_eq!(json["rows"][0]["cycles_p50"], 49);
        let page = fs::read_to_string(outputs.html.unwrap()).unwrap();
        assert!(page.contains("<svg") && page.contains("counted &lt;twice&gt;"), "{page}");
        let bad = Outputs { json: Some("/nonexistent/a".into()), svg: None, html: None };
        assert!(sample().deliver(&bad).unwrap_err().contains("/nonexistent/a"));
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(figure(34464.61), "34465");
        assert_eq!(figure(59.604), "59.6");
        assert_eq!(figure(0.0), "0.00");
        assert_eq!(figure(1.5), "1.50");
        assert_eq!(figure(0.00012), "1.2e-4");
    }
}
