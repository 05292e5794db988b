//! Lists of numbers in errors, such as those of workers: short, however many numbers there are.

use std::fmt;
use std::ops::RangeInclusive;

/// Most runs of numbers that are listed.
const MAX_RUNS: usize = 8;

/// Least numbers in a row that are written as a range.
const RANGE: usize = 3;

/// A list of numbers in ascending order, as errors show it: `0 to 5, 7, 9`. Of many runs it names
/// the first ones, and says how many numbers there are beside them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NumberList {
    runs: Vec<RangeInclusive<usize>>,
    /// Number of all numbers, and of those in `runs`.
    count: usize,
    listed: usize,
}

impl NumberList {
    pub(crate) fn of(numbers: impl IntoIterator<Item = usize>) -> Self {
        let mut this = Self::default();
        for number in numbers {
            let (has_all, has_room) = (this.listed == this.count, this.runs.len() < MAX_RUNS);
            this.count += 1;
            match this.runs.last_mut() {
                _ if !has_all => continue,
                Some(run) if *run.end() + 1 == number => *run = *run.start()..=number,
                _ if has_room => this.runs.push(number..=number),
                _ => continue,
            }
            this.listed += 1;
        }
        this
    }

    /// Returns the number of numbers.
    pub(crate) fn len(&self) -> usize {
        self.count
    }
}

impl fmt::Display for NumberList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for run in &self.runs {
            let (start, end) = (*run.start(), *run.end());
            if end - start + 1 >= RANGE {
                write!(f, "{separator}{start} to {end}")?;
            } else {
                write!(f, "{separator}{start}")?;
                (start + 1..=end).try_for_each(|number| write!(f, ", {number}"))?;
            }
            separator = ", ";
        }
        if self.listed < self.count { write!(f, " and {} more", self.count - self.listed) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_ranges_and_is_short_for_any_numbers() {
        let text = |numbers: &[usize]| NumberList::of(numbers.iter().copied()).to_string();
        assert_eq!(text(&[]), "");
        assert_eq!(text(&[3]), "3");
        assert_eq!(text(&[0, 1, 3, 4, 5, 9]), "0, 1, 3 to 5, 9");
        assert_eq!(NumberList::of(0..1024).to_string(), "0 to 1023");
        let every_other = NumberList::of((0..2048).step_by(2));
        assert_eq!(every_other.to_string(), "0, 2, 4, 6, 8, 10, 12, 14 and 1016 more");
        assert_eq!(every_other.len(), 1024);
        // Numbers behind those that are left out are left out, too.
        assert_eq!(text(&[0, 2, 4, 6, 8, 10, 12, 14, 16, 17]), "0, 2, 4, 6, 8, 10, 12, 14 and 2 more");
    }
}
