// SPDX-License-Identifier: MIT
//! Median and spread: all the statistics that a comparison needs.

use serde::{Deserialize, Serialize};

/// Median, smallest and largest of some figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    /// Median; the mean of the middle two where their number is even.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

/// Median and spread; `None` of nothing.
pub(crate) fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let sorted = sorted(values);
    let (first, last) = (*sorted.first()?, *sorted.last()?);
    Some(Spread { median: quantile(&sorted, 0.5), min: first, max: last })
}

/// Median; `None` of nothing.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    spread(values).map(|s| s.median)
}

/// Upper quartile; `None` of nothing.
pub(crate) fn upper_quartile(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let sorted = sorted(values);
    (!sorted.is_empty()).then(|| quantile(&sorted, 0.75))
}

fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Quantile by linear interpolation between the two nearest.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = (sorted.len() - 1) as f64 * q;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_middle_two() {
        assert_eq!(spread([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([7.0]), Some(7.0));
        assert_eq!(median([]), None);
    }

    #[test]
    fn the_upper_quartile_has_a_quarter_above_it() {
        assert_eq!(upper_quartile([1.0, 2.0, 3.0, 4.0, 5.0]), Some(4.0));
        assert_eq!(upper_quartile([]), None);
    }
}
