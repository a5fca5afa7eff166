//! A report as one page that needs nothing else.

use super::Report;
use std::fmt::Write;

const STYLE: &str = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}\
    table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #bbb;padding:.25em .7em}\
    th{background:#eee;text-align:left}td:nth-child(n+3){text-align:right}\
    code{background:#f4f4f4;padding:.1em .3em}svg{max-width:100%;height:auto}";

pub(super) fn page(report: &Report) -> Result<String, String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{0}</title>\
         <style>{STYLE}</style>\n<h1>{0}</h1>\n<p>{1}</p>\n<table>\n",
        escape(report.experiment),
        escape(&report.method)
    );
    for (index, row) in report.table.iter().enumerate() {
        let tag = if index == 0 { "th" } else { "td" };
        let cells: String =
            row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        let _ = writeln!(page, "<tr>{cells}</tr>");
    }
    page += "</table>\n";
    if let Some(plot) = &report.plot {
        page += &plot.to_svg()?;
    }
    for note in &report.notes {
        let _ = writeln!(page, "<p>{}</p>", escape(note));
    }
    let host = &report.host;
    let _ = writeln!(
        page,
        "<h2>Host</h2>\n<p>{} KVM, {}, {} CPUs, Linux {}</p>\n<h2>Repeat it</h2>\n\
         <p><code>{}</code></p>\n<p>Revision {}</p>\n</html>",
        escape(&host.kind),
        escape(&host.cpu),
        host.cpus,
        escape(&host.kernel),
        escape(&report.command),
        escape(report.git)
    );
    Ok(page)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
