//! Regions of a tensor: boxes of elements, and how they meet.

use std::ops::Range;

/// A box of elements: a range of each dimension. A tensor without dimensions has one region, which
/// is its one element.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Region(pub(super) Vec<Range<i64>>);

impl Region {
    /// Returns the region of all elements.
    pub(super) fn whole(shape: &[i64]) -> Self {
        Self(shape.iter().map(|length| 0..*length).collect())
    }

    /// Returns true if it has no elements.
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().any(|range| range.start >= range.end)
    }

    /// Returns the lengths of its dimensions.
    pub(super) fn shape(&self) -> Vec<i64> {
        self.0.iter().map(|range| range.end - range.start).collect()
    }

    /// Returns the number of elements.
    pub(super) fn volume(&self) -> u128 {
        self.shape().into_iter().map(|length| u128::try_from(length).unwrap_or(0)).product()
    }

    /// Returns true if it has all elements of `other`.
    pub(super) fn contains(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(own, other)| own.start <= other.start && other.end <= own.end)
    }

    /// Returns true if there are elements that are in both.
    pub(super) fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
    }

    /// Returns the elements that are in both, if there are any.
    pub(super) fn intersection(&self, other: &Self) -> Option<Self> {
        let each = self.0.iter().zip(&other.0).map(|(a, b)| a.start.max(b.start)..a.end.min(b.end));
        self.meets(other).then(|| Self(each.collect()))
    }

    /// Returns the elements that are not in `hole`, which is within this region: regions that do
    /// not meet.
    pub(super) fn without(&self, hole: &Self) -> Vec<Self> {
        let mut left = self.clone();
        let mut parts = Vec::new();
        for (dim, range) in hole.0.iter().enumerate() {
            for part in [left.0[dim].start..range.start, range.end..left.0[dim].end] {
                if part.start < part.end {
                    let mut region = left.clone();
                    region.0[dim] = part;
                    parts.push(region);
                }
            }
            left.0[dim] = range.clone();
        }
        parts
    }

    /// Returns the same region as seen from the first element of `outer`, which contains it.
    pub(super) fn within(&self, outer: &Self) -> Vec<Range<i64>> {
        let each = self.0.iter().zip(&outer.0);
        each.map(|(own, outer)| own.start - outer.start..own.end - outer.start).collect()
    }

    /// Divides the region into as many regions along the first of its dimensions that is not of
    /// length 1, or into as many as that has elements. They differ by one element there at most.
    pub(super) fn split(self, count: usize) -> Vec<Self> {
        let Some(dim) = self.0.iter().position(|range| range.end - range.start > 1) else { return vec![self] };
        let Range { start, end } = self.0[dim];
        let length = i128::from(end - start);
        let count = i128::try_from(count).unwrap_or(1).clamp(1, length);
        let at = |number: i128| start + (length * number / count) as i64;
        let part = |number: i128| {
            let mut region = self.clone();
            region.0[dim] = at(number)..at(number + 1);
            region
        };
        (0..count).map(part).collect()
    }
}
