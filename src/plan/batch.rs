//! Copies in order, as the threads that move bytes take them.

use super::Pattern;

/// Where a copy starts on both sides, in bytes from the beginnings of its pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First source byte.
    pub src: u64,
    /// First destination byte.
    pub dst: u64,
}

/// Copies in order. The blocks of a request mostly differ in their place alone, so a shape is kept
/// once for all of its places that follow each other.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Each with the end of its places, which begin where those of the one before end.
    shapes: Vec<(Pattern, usize)>,
    places: Vec<Place>,
}

impl Batch {
    /// No copies.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a copy at the end.
    pub fn push(&mut self, pattern: Pattern) {
        self.extend(&pattern, std::iter::once(pattern.place()));
    }

    /// Adds copies that differ in their place alone; that of `shape` is of no meaning.
    pub(super) fn extend(&mut self, shape: &Pattern, places: impl Iterator<Item = Place>) {
        self.places.extend(places);
        let end = self.places.len();
        match self.shapes.last_mut() {
            Some((last, last_end)) if last.differs_in_place_only(shape) => *last_end = end,
            _ => self.shapes.push((*shape, end)),
        }
    }

    /// The copies, those of one shape together; the offsets of a shape are of no meaning.
    pub fn shapes(&self) -> impl Iterator<Item = (&Pattern, &[Place])> + Clone {
        let mut begin = 0;
        self.shapes.iter().map(move |(shape, end)| {
            let places = &self.places[begin..*end];
            begin = *end;
            (shape, places)
        })
    }

    /// The copies one by one.
    pub fn iter(&self) -> impl Iterator<Item = Pattern> + Clone {
        self.shapes()
            .flat_map(|(shape, places)| places.iter().map(|place| shape.at(*place)))
    }

    /// Number of copies.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Takes all copies out; the memory is kept.
    pub fn clear(&mut self) {
        self.shapes.clear();
        self.places.clear();
    }
}

impl FromIterator<Pattern> for Batch {
    fn from_iter<T: IntoIterator<Item = Pattern>>(patterns: T) -> Self {
        let mut batch = Self::new();
        patterns.into_iter().for_each(|pattern| batch.push(pattern));
        batch
    }
}

impl Pattern {
    /// Where it starts.
    pub fn place(&self) -> Place {
        Place {
            src: self.src_offset,
            dst: self.dst_offset,
        }
    }

    /// The same copy elsewhere in the same pools.
    pub fn at(&self, place: Place) -> Self {
        Self {
            src_offset: place.src,
            dst_offset: place.dst,
            ..*self
        }
    }

    fn differs_in_place_only(&self, other: &Self) -> bool {
        let pools = |p: &Self| (p.src_pool, p.dst_pool);
        pools(self) == pools(other)
            && self.run == other.run
            && self.axes() == other.axes()
            && self.rank == other.rank
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Dim;

    #[test]
    fn copies_come_back_as_they_were_pushed() {
        let one = Pattern {
            src_pool: 1,
            dst_pool: 2,
            run: 64,
            ..Pattern::default()
        };
        let mut strided = one;
        (strided.rank, strided.dims[0]) = (
            1,
            Dim {
                count: 2,
                src: 100,
                dst: 64,
            },
        );
        let place = |src, dst| Place { src, dst };
        let all = [
            one.at(place(0, 9)),
            one.at(place(7, 0)),
            strided.at(place(7, 0)),
            one.at(place(1, 1)),
            Pattern { src_pool: 3, ..one },
            Pattern { dst_pool: 3, ..one },
            Pattern { run: 65, ..one },
        ];
        let mut batch: Batch = all.into_iter().collect();
        assert_eq!(batch.iter().collect::<Vec<_>>(), all);
        let together: Vec<_> = batch.shapes().map(|(_, places)| places.len()).collect();
        assert_eq!(together, [2, 1, 1, 1, 1, 1]);
        assert_eq!(batch.len(), 7);

        batch.clear();
        assert!(batch.is_empty());
        batch.extend(&one, [place(5, 6), place(7, 8)].into_iter());
        batch.push(one.at(place(1, 2)));
        batch.extend(&strided, [place(3, 4)].into_iter());
        let expected = [
            one.at(place(5, 6)),
            one.at(place(7, 8)),
            one.at(place(1, 2)),
            strided.at(place(3, 4)),
        ];
        assert_eq!(batch.iter().collect::<Vec<_>>(), expected);
        assert_eq!(batch.shapes().count(), 2);
    }
}
