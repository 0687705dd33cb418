// SPDX-License-Identifier: MIT
//! What perftest prints, read back.
//!
//! Its clock is calibrated in a fraction of a second and goes wrong under load: figures are then
//! `inf`, `nan` or zero, or the program prints none and exits with 1. Such output is told apart
//! from a real failure, because the run is worth repeating.

use std::fmt;

use super::command::Figure;

/// Figures of one latency test, in the unit that the program was told to report in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Latency {
    /// `t_typical`: the median.
    pub median: f64,
    /// `99% percentile`.
    pub p99: f64,
    /// `t_avg`.
    pub mean: f64,
}

/// Figures of one bandwidth test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate {
    /// `MsgRate`, as messages per second.
    pub per_second: f64,
}

/// Why no figures could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// perftest's clock was wrong.
    Clock(String),
    /// There is no report, or not all of it.
    Missing(String),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unreadable::Clock(what) => write!(f, "perftest's clock was off: {what}"),
            Unreadable::Missing(what) => f.write_str(what),
        }
    }
}

/// Lines by which perftest complains about its clock.
const CLOCK_COMPLAINTS: &[&str] =
    &["Correlation coefficient", "Can't produce a report", "couldn't acquire cpu frequency"];

/// The line in which perftest complains about its clock, if there is one.
pub(crate) fn clock_complaint(text: &str) -> Option<&str> {
    text.lines().map(str::trim).find(|line| CLOCK_COMPLAINTS.iter().any(|c| line.contains(c)))
}

/// Reads the report of a latency test.
///
/// # Errors
/// There is no report, it is cut off, or its figures are no positive numbers.
pub(crate) fn latency(text: &str) -> Result<Latency, Unreadable> {
    // #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%
    let row = row(text, Figure::Latency, "t_typical", 9)?;
    Ok(Latency { median: positive(row[4])?, mean: positive(row[5])?, p99: positive(row[7])? })
}

/// Reads the report of a bandwidth test.
///
/// # Errors
/// As [`latency`].
pub(crate) fn rate(text: &str) -> Result<Rate, Unreadable> {
    // #bytes #iterations peak average MsgRate[Mpps]
    let row = row(text, Figure::Rate, "MsgRate[Mpps]", 5)?;
    Ok(Rate { per_second: positive(row[4])? * 1e6 })
}

/// The words of the one row below the heading that names `column`.
fn row<'a>(text: &'a str, figure: Figure, column: &str, columns: usize) -> Result<Vec<&'a str>, Unreadable> {
    let mut lines = text.lines().map(str::trim);
    let heading = lines.find(|line| line.starts_with("#bytes"));
    match heading {
        Some(heading) if heading.contains(column) => {}
        Some(heading) => {
            return Err(Unreadable::Missing(format!("the report has no column {column}: {heading}")));
        }
        None => {
            return Err(match clock_complaint(text) {
                Some(complaint) => Unreadable::Clock(complaint.to_owned()),
                None => Unreadable::Missing("no report was printed".to_owned()),
            });
        }
    }
    let row = lines
        .find(|line| line.starts_with(|c: char| c.is_ascii_digit()))
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    match row {
        Some(row) if row.len() == columns => Ok(row),
        Some(row) => {
            Err(Unreadable::Missing(format!("the report is cut off: {} of {columns} columns", row.len())))
        }
        // The heading comes before the measurement, the row only after it.
        None => Err(match (clock_complaint(text), figure) {
            (Some(complaint), _) => Unreadable::Clock(complaint.to_owned()),
            (None, Figure::Latency) => Unreadable::Missing("the latencies were not printed".to_owned()),
            (None, Figure::Rate) => Unreadable::Missing("the rate was not printed".to_owned()),
        }),
    }
}

fn positive(word: &str) -> Result<f64, Unreadable> {
    match word.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err(Unreadable::Clock(format!("a figure of '{word}'"))),
    }
}

/// The last lines of a process's output that say something, for messages to the user.
pub(crate) fn last_words(text: &str) -> String {
    let said: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.chars().all(|c| "-*= ".contains(c)))
        .collect();
    if said.is_empty() {
        return "(nothing)".to_owned();
    }
    said[said.len().saturating_sub(3)..].join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ib_send_lat 4.5 over the soft device; the tail of the client's output.
    const LAT: &str = "\
---------------------------------------------------------------------------------------
                    Send Latency Test
 Test with events. Using fw_soft0_comp0
 Dual-port       : OFF		Device         : fw_soft0
---------------------------------------------------------------------------------------
 local address: LID 0x01 QPN 0x2000 PSN 0x263d57
 remote address: LID 0x01 QPN 0x1000 PSN 0x63598
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 2       1000          7.74           1970.68      8.29     	       20.45       	115.38 		736.19  		1970.68
---------------------------------------------------------------------------------------
";
    /// ib_send_bw 4.5 over the soft device.
    const BW: &str = "\
 Data ex. method : Ethernet
---------------------------------------------------------------------------------------
 local address: LID 0x01 QPN 0x2000 PSN 0x7fa1f8
 remote address: LID 0x01 QPN 0x1000 PSN 0xa9182e
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1000             19733.75            13082.38		   0.209318
---------------------------------------------------------------------------------------
";

    #[test]
    fn latencies_are_read() {
        assert_eq!(latency(LAT), Ok(Latency { median: 8.29, p99: 736.19, mean: 20.45 }));
    }

    #[test]
    fn a_rate_is_read_in_messages_per_second() {
        let rate = rate(BW).unwrap();
        assert!((rate.per_second - 209_318.0).abs() < 1e-6, "{rate:?}");
    }

    #[test]
    fn inf_nan_and_zero_are_the_clock_and_a_nan_of_the_deviation_does_not_matter() {
        for (from, to) in [("8.29", "inf"), ("736.19", "-nan"), ("20.45", "0.00"), ("8.29", "-inf")] {
            assert!(matches!(latency(&LAT.replace(from, to)), Err(Unreadable::Clock(_))), "{to}");
        }
        assert!(latency(&LAT.replace("115.38", "-nan")).is_ok());
        assert!(matches!(rate(&BW.replace("0.209318", "inf")), Err(Unreadable::Clock(_))));
    }

    #[test]
    fn a_complaint_about_the_clock_in_place_of_the_report_is_the_clock() {
        let text = "Correlation coefficient r^2: 0.83 < 0.9\nCan't produce a report\n";
        assert!(matches!(latency(text), Err(Unreadable::Clock(_))));
        let heading: String = LAT.lines().take(9).map(|l| format!("{l}\n")).collect();
        assert!(matches!(latency(&(heading + text)), Err(Unreadable::Clock(_))));
    }

    #[test]
    fn output_that_is_cut_off_is_missing_at_every_line() {
        let lines: Vec<&str> = LAT.lines().collect();
        for end in 0..10 {
            let text = lines[..end].join("\n");
            assert!(matches!(latency(&text), Err(Unreadable::Missing(_))), "{end}");
        }
        let half = LAT.split("20.45").next().unwrap();
        assert!(matches!(latency(half), Err(Unreadable::Missing(_))));
    }

    #[test]
    fn one_report_is_not_taken_for_the_other() {
        assert!(matches!(latency(BW), Err(Unreadable::Missing(_))));
        assert!(matches!(rate(LAT), Err(Unreadable::Missing(_))));
    }

    #[test]
    fn last_words_leave_out_rulers_and_blanks() {
        assert_eq!(last_words("\n----\n Couldn't connect \n\n***\n"), "Couldn't connect");
        assert_eq!(last_words(" \n---\n"), "(nothing)");
    }
}
