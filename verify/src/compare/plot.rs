// SPDX-License-Identifier: MIT
//! The comparison as a picture: one bar for each row, one panel for each placement, SVG and PNG.
//!
//! Latencies span four decades, so their axis is logarithmic; rates start at zero. Text is drawn in
//! an embedded font, because a fresh machine has none. The layout is by hand, in the units of the
//! SVG; the PNG is the same at twice the size.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{register_font, FontStyle};

use super::cell::{Kind, Placement};
use super::result::{Comparison, Row};
use super::table::{figure, group};
use crate::devices::SOFT_DEVICE;

const WIDTH: i32 = 900;
const HEADER: i32 = 88;
const PANEL_HEAD: i32 = 34;
const ROW: i32 = 36;
const BAR: i32 = 20;
const AXIS: i32 = 44;
const FOOTER: i32 = 30;
/// Where the bars begin and end.
const LEFT: i32 = 114;
const RIGHT: i32 = WIDTH - 205;

const INK: RGBColor = RGBColor(0x1f, 0x29, 0x33);
const SOFT_INK: RGBColor = RGBColor(0x6b, 0x77, 0x85);
const GRID: RGBColor = RGBColor(0xe3, 0xe7, 0xec);

fn colour(kind: Kind) -> RGBColor {
    match kind {
        Kind::RawShm | Kind::RawPipe => RGBColor(0xb4, 0xbd, 0xc8),
        Kind::Polling => RGBColor(0x4a, 0x7f, 0xb5),
        Kind::Event => RGBColor(0xe0, 0x8a, 0x3c),
        Kind::Fastwake => RGBColor(0x1f, 0x9d, 0x6b),
    }
}

/// Draws `compare.svg` and `compare.png` into `dir`; returns their paths.
///
/// # Errors
/// What the file system or the drawing library reports.
pub(crate) fn draw(comparison: &Comparison, dir: &Path) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    // Registered under the name that the SVG gives to its viewer.
    for (style, font) in [(FontStyle::Normal, ttf_noto_sans::REGULAR), (FontStyle::Bold, ttf_noto_sans::BOLD)]
    {
        register_font("sans-serif", style, font).map_err(|_| anyhow!("the embedded font cannot be read"))?;
    }
    let height = height(comparison);
    let (svg, png) = (dir.join("compare.svg"), dir.join("compare.png"));
    let size = |scale: i32| ((WIDTH * scale) as u32, (height * scale) as u32);
    let failed = |file: &Path| format!("drawing {}", file.display());
    let area = SVGBackend::new(&svg, size(1)).into_drawing_area();
    Canvas { area, scale: 1 }.comparison(comparison).with_context(|| failed(&svg))?;
    let area = BitMapBackend::new(&png, size(2)).into_drawing_area();
    Canvas { area, scale: 2 }.comparison(comparison).with_context(|| failed(&png))?;
    Ok(vec![svg, png])
}

fn height(c: &Comparison) -> i32 {
    let panels = placements(c).len() as i32;
    HEADER + FOOTER + panels * (PANEL_HEAD + AXIS) + drawn(c).count() as i32 * ROW
}

fn placements(c: &Comparison) -> Vec<Placement> {
    [Placement::TwoCores, Placement::OneCore, Placement::TwoHosts]
        .into_iter()
        .filter(|p| drawn(c).any(|row| row.placement == *p))
        .collect()
}

/// Rows that have a figure.
fn drawn(c: &Comparison) -> impl Iterator<Item = &Row> {
    let rates = c.compares_rates();
    c.rows.iter().filter(move |row| value(row, rates).is_some_and(|v| v > 0.0))
}

fn value(row: &Row, rates: bool) -> Option<f64> {
    if rates {
        row.msgs_per_s
    } else {
        row.median_us
    }
}

/// From figures to places on a panel's axis.
struct Scale {
    range: Range<f64>,
    logarithmic: bool,
}

impl Scale {
    /// From a whole decade, or from zero for rates, to a little above the largest figure.
    fn of(rows: &[&Row], rates: bool) -> Scale {
        let all = || rows.iter().flat_map(|r| [value(r, rates), r.min, r.max]).flatten().filter(|v| *v > 0.0);
        let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
        if rates {
            return Scale { range: 0.0..high * 1.05, logarithmic: false };
        }
        // A bar that ended at the very start of the axis would not be seen.
        let low = 10f64.powf((low * 0.8).log10().floor());
        Scale { range: low..(high * 1.1).max(low * 10.0), logarithmic: true }
    }

    fn x(&self, v: f64) -> i32 {
        let (a, b) = (self.range.start, self.range.end);
        let part = if self.logarithmic { (v / a).log10() / (b / a).log10() } else { (v - a) / (b - a) };
        LEFT + (part.clamp(0.0, 1.0) * f64::from(RIGHT - LEFT)).round() as i32
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        if self.logarithmic {
            let (from, to) = (self.range.start.log10().round() as i32, self.range.end.log10().floor() as i32);
            return (from..=to).map(|e| 10f64.powi(e)).map(|v| (v, time(v))).collect();
        }
        let step = 10f64.powf(self.range.end.log10().floor());
        let step = if self.range.end / step < 2.0 { step / 4.0 } else { step };
        (0..)
            .map(|i| f64::from(i) * step)
            .take_while(|v| *v <= self.range.end)
            .map(|v| (v, group(v.round() as u64)))
            .collect()
    }
}

/// A decade of microseconds in the unit that people say.
fn time(us: f64) -> String {
    match us {
        v if v < 0.99 => format!("{} ns", (v * 1000.0).round()),
        v if v < 999.0 => format!("{} µs", v.round()),
        v => format!("{} ms", (v / 1000.0).round()),
    }
}

struct Canvas<B: DrawingBackend> {
    area: DrawingArea<B, Shift>,
    scale: i32,
}

#[derive(Clone, Copy)]
struct Text {
    size: f64,
    bold: bool,
    colour: RGBColor,
    across: HPos,
}

/// Sizes are those of the drawing library, which makes a fifth less of them.
const NORMAL: Text = Text { size: 16.5, bold: false, colour: INK, across: HPos::Left };

impl<B: DrawingBackend> Canvas<B>
where
    B::ErrorType: 'static,
{
    fn comparison(&self, c: &Comparison) -> Result<()> {
        self.area.fill(&WHITE)?;
        let rates = c.compares_rates();
        let what = if rates { "messages per second" } else { "latency, one way" };
        let title = Text { size: 26.0, bold: true, ..NORMAL };
        self.text(24, 30, &format!("{}: {what}", c.command), title)?;
        let rounds = format!("{}, {} interleaved rounds; {}", c.device, c.rounds, c.host.summary());
        let quiet = Text { size: 15.5, colour: SOFT_INK, ..NORMAL };
        self.text(24, 56, &rounds, quiet)?;
        let mut top = HEADER;
        for placement in placements(c) {
            top = self.panel(c, placement, top)?;
        }
        let mut foot = "bar: median of the rounds; line: smallest to largest".to_owned();
        if c.device == SOFT_DEVICE {
            foot += ".  Soft device: no NIC, PCIe or interrupt is modelled";
        }
        self.text(24, top + FOOTER / 2 - 4, &foot, Text { size: 14.5, ..quiet })?;
        self.area.present()?;
        Ok(())
    }

    /// Draws the rows of a placement from `top` on; returns where the next panel begins.
    fn panel(&self, c: &Comparison, placement: Placement, top: i32) -> Result<i32> {
        let rates = c.compares_rates();
        let rows: Vec<&Row> = drawn(c).filter(|row| row.placement == placement).collect();
        let name = match placement {
            Placement::OneCore => "server and client share one core",
            Placement::TwoCores => "server and client on two cores",
            Placement::TwoHosts => "server and client on two hosts",
        };
        self.text(24, top + PANEL_HEAD / 2 - 3, name, Text { size: 18.0, bold: true, ..NORMAL })?;
        let (first, scale) = (top + PANEL_HEAD, Scale::of(&rows, rates));
        let bottom = first + rows.len() as i32 * ROW;
        for (v, label) in scale.ticks() {
            let x = scale.x(v);
            self.line([(x, first), (x, bottom + 4)], GRID.into(), 1)?;
            let style = Text { size: 14.5, colour: SOFT_INK, across: HPos::Center, ..NORMAL };
            self.text(x, bottom + 14, &label, style)?;
        }
        for (i, row) in rows.iter().enumerate() {
            self.row(c, row, &scale, first + i as i32 * ROW + ROW / 2)?;
        }
        Ok(bottom + AXIS)
    }

    fn row(&self, c: &Comparison, row: &Row, scale: &Scale, middle: i32) -> Result<()> {
        let rates = c.compares_rates();
        let Some(v) = value(row, rates) else { return Ok(()) };
        let ours = row.name == Kind::Fastwake;
        let label = Text { bold: ours, across: HPos::Right, ..NORMAL };
        self.text(LEFT - 12, middle, row.name.name(), label)?;
        let end = scale.x(v).max(LEFT + 2);
        let bar = [(LEFT, middle - BAR / 2), (end, middle + BAR / 2)].map(|p| self.at(p));
        self.area.draw(&Rectangle::new(bar, colour(row.name).filled()))?;
        let mut text_at = end;
        if let (Some(min), Some(max)) = (row.min, row.max) {
            let (a, b) = (scale.x(min), scale.x(max));
            self.line([(a, middle), (b, middle)], INK.mix(0.75), 1)?;
            for x in [a, b] {
                self.line([(x, middle - 4), (x, middle + 4)], INK.mix(0.75), 1)?;
            }
            text_at = text_at.max(b);
        }
        let shown =
            if rates { format!("{} /s", group(v.round() as u64)) } else { format!("{} µs", figure(v)) };
        let strong = Text { bold: true, ..NORMAL };
        self.text(text_at + 10, middle, &shown, strong)?;
        if let Some(note) = note(c, row, rates) {
            let quiet = Text { size: 15.0, colour: SOFT_INK, ..NORMAL };
            let (width, _) =
                FontDesc::new(FontFamily::SansSerif, strong.size, FontStyle::Bold).box_size(&shown)?;
            // The viewer of an SVG brings a font of its own, a fifth wider at the most.
            self.text(text_at + 24 + width as i32 * 5 / 4, middle, &note, quiet)?;
        }
        Ok(())
    }

    fn at(&self, (x, y): (i32, i32)) -> (i32, i32) {
        (x * self.scale, y * self.scale)
    }

    fn line(&self, ends: [(i32, i32); 2], colour: RGBAColor, width: i32) -> Result<()> {
        let style = colour.stroke_width((width * self.scale) as u32);
        self.area.draw(&PathElement::new(ends.map(|p| self.at(p)).to_vec(), style))?;
        Ok(())
    }

    fn text(&self, x: i32, y: i32, text: &str, t: Text) -> Result<()> {
        let style = if t.bold { FontStyle::Bold } else { FontStyle::Normal };
        let font = FontDesc::new(FontFamily::SansSerif, t.size * f64::from(self.scale), style);
        let style = TextStyle::from(font).color(&t.colour).pos(Pos::new(t.across, VPos::Center));
        self.area.draw(&plotters::element::Text::new(text.to_owned(), self.at((x, y)), style))?;
        Ok(())
    }
}

/// What stands behind FastWake's figure: how it compares with polling or with event mode.
fn note(c: &Comparison, row: &Row, rates: bool) -> Option<String> {
    if row.name != Kind::Fastwake {
        return None;
    }
    let ratio = |name: &str| c.ratios.iter().find(|r| r.name == name && r.placement == row.placement);
    match ratio("fastwake/polling").filter(|_| row.placement != Placement::OneCore && !rates) {
        Some(r) => Some(format!("{:.2} × polling", r.median)),
        None => ratio("fastwake/event").map(|r| format!("{:.2} × event", r.median)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::result::tests::{comparison, good};
    use super::*;

    #[test]
    fn both_pictures_are_drawn_with_every_row() {
        let dir = tempfile::tempdir().unwrap();
        let files = draw(&good(), dir.path()).unwrap();
        let svg = std::fs::read_to_string(&files[0]).unwrap();
        for word in ["raw-shm", "raw-pipe", "polling", "event", "fastwake", "1.07 × polling", "no NIC"] {
            assert!(svg.contains(word), "{word} is not in the picture");
        }
        let png = std::fs::read(&files[1]).unwrap();
        assert!(png.starts_with(b"\x89PNG") && png.len() > 5000, "{} bytes", png.len());
    }

    #[test]
    fn a_comparison_in_which_everything_failed_is_drawn_too() {
        let dir = tempfile::tempdir().unwrap();
        let mut c = good();
        for row in &mut c.rows {
            (row.median_us, row.min, row.max) = (None, None, None);
        }
        assert_eq!(draw(&c, dir.path()).unwrap().len(), 2);
    }

    #[test]
    fn the_axis_of_latencies_has_whole_decades_and_that_of_rates_a_zero() {
        let c = good();
        let rows: Vec<&Row> = c.rows.iter().collect();
        let scale = Scale::of(&rows, false);
        let labels: Vec<_> = scale.ticks().into_iter().map(|t| t.1).collect();
        assert_eq!(labels, ["10 ns", "100 ns", "1 µs"]);
        assert!(scale.x(0.01) == LEFT && scale.x(9.0) < RIGHT && scale.x(0.1) > LEFT);
        assert_eq!(scale.x(1e9), RIGHT);
        let scale = Scale::of(&rows, true);
        assert_eq!(scale.ticks()[0].1, "0");
    }

    #[test]
    fn fastwake_is_set_against_polling_on_two_cores_and_against_events_on_one() {
        let medians: &[(Kind, &[f64])] =
            &[(Kind::Polling, &[4000.0]), (Kind::Event, &[5.0]), (Kind::Fastwake, &[2.0])];
        let c = comparison(Placement::OneCore, medians);
        assert_eq!(note(&c, &c.rows[2], false).as_deref(), Some("0.40 × event"));
        assert_eq!(note(&c, &c.rows[1], false), None);
    }
}
