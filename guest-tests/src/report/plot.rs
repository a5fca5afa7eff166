//! Plots, drawn by plotters into SVG.

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use std::ops::Range;

/// A plot: what it shows, not how.
#[derive(Debug, Clone)]
pub struct Plot {
    /// One line above it.
    pub title: String,
    /// What runs to the right, with its unit.
    pub x: String,
    /// What runs up, with its unit.
    pub y: String,
    /// Whether the upward axis is logarithmic; values must then be positive.
    pub log_y: bool,
    /// The data.
    pub shape: Shape,
}

/// What is drawn.
#[derive(Debug, Clone)]
pub enum Shape {
    /// One bar for each named value.
    Bars(Vec<(String, f64)>),
    /// Lines through points.
    Lines(Vec<Series>),
}

/// A named line.
#[derive(Debug, Clone)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

const SIZE: (u32, u32) = (900, 480);

/// A linear or logarithmic axis, chosen when the plot is drawn.
enum Axis {
    Linear(Range<f64>),
    Log(Range<f64>),
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let place = match self {
            Axis::Linear(r) => (value - r.start) / (r.end - r.start),
            Axis::Log(r) => (value.max(r.start) / r.start).log10() / (r.end / r.start).log10(),
        };
        limit.0 + (f64::from(limit.1 - limit.0) * place).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match self {
            Axis::Linear(r) => RangedCoordf64::from(r.clone()).key_points(hint),
            Axis::Log(r) => {
                let decade = |e: i32| 10f64.powi(e);
                let first = r.start.log10().ceil() as i32;
                (first..).map(decade).take_while(|v| *v <= r.end * 1.0001).collect()
            }
        }
    }

    fn range(&self) -> Range<f64> {
        match self {
            Axis::Linear(r) | Axis::Log(r) => r.clone(),
        }
    }
}

impl Plot {
    /// The plot as SVG.
    ///
    /// # Errors
    /// What the drawing library says.
    pub fn to_svg(&self) -> Result<String, String> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|e| format!("cannot draw the plot ({e})"))?;
        Ok(svg)
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error + '_>> {
        let (xs, ys) = self.values();
        let (low_y, high_y) = bounds(&ys);
        let axis = if self.log_y {
            let low = 10f64.powf(low_y.max(1e-9).log10().floor());
            Axis::Log(low..10f64.powf(high_y.max(low * 10.0).log10().ceil()))
        } else {
            Axis::Linear(low_y.min(0.0)..(high_y * 1.05).max(low_y.min(0.0) + 1e-9))
        };
        let floor = axis.range().start;
        let bars = matches!(self.shape, Shape::Bars(_));
        let (low_x, high_x) = bounds(&xs);
        let span = if bars { -0.5..xs.len() as f64 - 0.5 } else { low_x..high_x.max(low_x + 1e-9) };

        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(78)
            .build_cartesian_2d(span, axis)?;
        let names = match &self.shape {
            Shape::Bars(bars) => bars.iter().map(|(name, _)| name.clone()).collect(),
            Shape::Lines(_) => Vec::new(),
        };
        let name_at = |x: &f64| match names.get(x.round().max(0.0) as usize) {
            Some(name) if (x - x.round()).abs() < 0.01 => name.clone(),
            Some(_) => String::new(),
            None => crate::report::figure(*x),
        };
        chart
            .configure_mesh()
            .x_desc(&self.x)
            .y_desc(&self.y)
            .x_labels(if bars { names.len() } else { 10 })
            .x_label_formatter(&name_at)
            .y_label_formatter(&|y| crate::report::figure(*y))
            .light_line_style(WHITE)
            .draw()?;
        match &self.shape {
            Shape::Bars(bars) => {
                chart.draw_series(bars.iter().enumerate().map(|(i, (_, value))| {
                    let x = i as f64;
                    Rectangle::new(
                        [(x - 0.35, floor), (x + 0.35, *value)],
                        Palette99::pick(i).filled(),
                    )
                }))?;
            }
            Shape::Lines(lines) => {
                for (i, line) in lines.iter().enumerate() {
                    let style = Palette99::pick(i).stroke_width(2);
                    chart
                        .draw_series(
                            LineSeries::new(line.points.iter().copied(), style).point_size(3),
                        )?
                        .label(&line.name)
                        .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
                }
                chart
                    .configure_series_labels()
                    .background_style(WHITE.mix(0.85))
                    .border_style(BLACK.mix(0.3))
                    .draw()?;
            }
        }
        root.present()?;
        drop(chart);
        drop(root);
        Ok(())
    }

    fn values(&self) -> (Vec<f64>, Vec<f64>) {
        match &self.shape {
            Shape::Bars(bars) => bars.iter().enumerate().map(|(i, b)| (i as f64, b.1)).unzip(),
            Shape::Lines(lines) => lines.iter().flat_map(|l| l.points.iter().copied()).unzip(),
        }
    }
}

fn bounds(values: &[f64]) -> (f64, f64) {
    let finite = || values.iter().copied().filter(|v| v.is_finite());
    let low = finite().fold(f64::INFINITY, f64::min);
    let high = finite().fold(f64::NEG_INFINITY, f64::max);
    if low <= high { (low, high) } else { (0.0, 1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(shape: Shape, log_y: bool) -> String {
        let text = |s: &str| s.to_owned();
        Plot { title: text("t"), x: text("x"), y: text("y"), log_y, shape }.to_svg().unwrap()
    }

    #[test]
    fn bars_and_lines_are_drawn_and_odd_data_draws_too() {
        let bars = Shape::Bars(vec![("page".into(), 49.0), ("msr".into(), 3361.0)]);
        assert!(plot(bars, true).contains("page"));
        let line = |points| Series { name: "a".into(), points };
        let lines =
            Shape::Lines(vec![line(vec![(0.0, 1.0), (10.0, -2.0)]), line(vec![(5.0, 0.0)])]);
        assert!(plot(lines, false).starts_with("<svg"));
        plot(Shape::Bars(vec![]), true);
        plot(Shape::Lines(vec![line(vec![(1.0, 0.0)])]), true);
        plot(Shape::Lines(vec![line(vec![(f64::NAN, f64::INFINITY)])]), false);
    }
}
