//! Meshes: workers as a grid with named axes, which gives groups for collectives by name.

use std::fmt;

use rpc_core::{Result, RpcError};
use serde::{Deserialize, Serialize};

use super::command::Scope;
use super::grouping::Grouping;
use crate::error::WorkerId;

/// The most axes of a mesh.
const MAX_AXES: usize = 8;

/// The longest name of an axis, in bytes.
const MAX_NAME: usize = 64;

/// Bytes that an axis takes in memory beside its name, about.
const AXIS_COST: usize = 64;

/// All workers of a session as a grid with named axes: see
/// [`DiscoSession::mesh`](crate::DiscoSession::mesh).
///
/// Workers have their numbers in row-major order: along the last axis they are neighbours. A mesh
/// is plain data, the same at the controller and on the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
pub struct Mesh {
    axes: Vec<MeshAxis>,
}

/// An axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MeshAxis {
    name: String,
    size: u32,
}

/// The fields of a mesh as they come from a peer.
#[derive(Deserialize)]
struct Fields {
    axes: Vec<MeshAxis>,
}

impl Mesh {
    /// Creates a mesh of axes with these names and sizes.
    ///
    /// # Errors
    ///
    /// No axes, or too many; a name that is empty, too long, or there twice; a size of 0; 2^32
    /// workers or more.
    pub(crate) fn new<'a>(axes: impl IntoIterator<Item = (&'a str, u32)>) -> Result<Self> {
        Self::checked(axes.into_iter().map(|(name, size)| MeshAxis { name: name.to_owned(), size }).collect())
    }

    fn checked(axes: Vec<MeshAxis>) -> Result<Self> {
        let refused = |why: String| Err(RpcError::invalid_argument(format!("no mesh: {why}")));
        if axes.is_empty() || axes.len() > MAX_AXES {
            return refused(format!("it has 1 to {MAX_AXES} axes, not {}", axes.len()));
        }
        for (at, MeshAxis { name, size }) in axes.iter().enumerate() {
            if name.is_empty() || name.len() > MAX_NAME {
                return refused(format!("the name of an axis has 1 to {MAX_NAME} bytes, not {}", name.len()));
            }
            if *size == 0 {
                return refused(format!("the axis {name:?} has no workers; the least size is 1"));
            }
            if axes[..at].iter().any(|other| other.name == *name) {
                return refused(format!("two axes have the name {name:?}"));
            }
        }
        let product = axes.iter().try_fold(1_u32, |product, axis| product.checked_mul(axis.size));
        if product.is_none() {
            return refused("its axes have 2^32 workers or more together".to_owned());
        }
        Ok(Self { axes })
    }

    /// Returns the names and sizes of the axes, in their order.
    pub fn axes(&self) -> impl ExactSizeIterator<Item = (&str, u32)> + Clone {
        self.axes.iter().map(|axis| (axis.name.as_str(), axis.size))
    }

    /// Returns the number of workers, the product of all sizes.
    #[must_use]
    pub fn num_workers(&self) -> u32 {
        self.axes.iter().map(|axis| axis.size).product()
    }

    /// Returns the size of an axis: the number of workers in each of its groups.
    ///
    /// # Errors
    ///
    /// There is no such axis.
    pub fn size(&self, axis: &str) -> Result<u32> {
        Ok(self.axes[self.position(axis)?].size)
    }

    /// Returns the scope of collectives along an axis: each group has the workers that differ in
    /// their coordinate on this axis alone, in its order.
    ///
    /// # Errors
    ///
    /// There is no such axis.
    pub fn group(&self, axis: &str) -> Result<Scope> {
        let grouping = self.grouping(self.position(axis)?);
        Ok(if grouping.size() == self.num_workers() { Scope::World } else { Scope::Groups(grouping) })
    }

    /// Returns the coordinates of a worker, one for each axis.
    ///
    /// # Errors
    ///
    /// There is no such worker.
    pub fn coordinates(&self, worker: WorkerId) -> Result<Vec<u32>> {
        if worker.0 >= self.num_workers() {
            return Err(RpcError::invalid_argument(format!("there is no worker {worker} in the mesh {self}")));
        }
        Ok((0..self.axes.len()).map(|at| self.grouping(at).rank(worker).0).collect())
    }

    /// Returns the worker that has these coordinates: one for each axis, in any order.
    ///
    /// # Errors
    ///
    /// An axis that there is not, is missing or is there twice; a coordinate that is not below the
    /// axis's size.
    pub fn worker(&self, coordinates: &[(&str, u32)]) -> Result<WorkerId> {
        let mut found = vec![None; self.axes.len()];
        for (name, coordinate) in coordinates {
            let at = self.position(name)?;
            let size = self.axes[at].size;
            if *coordinate >= size {
                let text = format!("no coordinate {coordinate} on the axis {name:?}, which has {size} workers");
                return Err(RpcError::invalid_argument(text));
            }
            if found[at].replace(*coordinate).is_some() {
                return Err(RpcError::invalid_argument(format!("two coordinates on the axis {name:?}")));
            }
        }
        let mut number = 0;
        for (coordinate, axis) in found.into_iter().zip(&self.axes) {
            let missing = || RpcError::invalid_argument(format!("no coordinate on the axis {:?}", axis.name));
            number = number * axis.size + coordinate.ok_or_else(missing)?;
        }
        Ok(WorkerId(number))
    }

    /// Returns the first axis.
    #[cfg(test)]
    pub(crate) fn first_axis(&self) -> &MeshAxis {
        &self.axes[0]
    }

    /// Returns the groupings along the axes.
    pub(crate) fn groupings(&self) -> impl Iterator<Item = (&str, Grouping)> {
        self.axes.iter().enumerate().map(|(at, axis)| (axis.name.as_str(), self.grouping(at)))
    }

    /// Returns the bytes of the mesh in memory, about.
    pub(crate) fn cost(&self) -> usize {
        self.axes.iter().map(|axis| AXIS_COST + axis.name.len()).sum()
    }

    fn position(&self, name: &str) -> Result<usize> {
        self.axes.iter().position(|axis| axis.name == name).ok_or_else(|| {
            let text = format!("the mesh {self} has no axis {name:?}");
            RpcError::invalid_argument(text)
        })
    }

    fn grouping(&self, at: usize) -> Grouping {
        let stride = self.axes[at + 1..].iter().map(|axis| axis.size).product();
        // The product of all sizes fits.
        Grouping::new(self.axes[at].size, stride).unwrap_or(Grouping::of_blocks(1))
    }
}

impl TryFrom<Fields> for Mesh {
    type Error = RpcError;

    fn try_from(Fields { axes }: Fields) -> Result<Self> {
        Self::checked(axes)
    }
}

/// Writes the sizes by name, such as `(dp=2, tp=4)`.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, MeshAxis { name, size }) in self.axes.iter().enumerate() {
            write!(f, "{}{name}={size}", if at == 0 { "(" } else { ", " })?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_have_coordinates_in_row_major_order() {
        let mesh = Mesh::new([("dp", 2), ("pp", 1), ("tp", 3)]).unwrap();
        assert_eq!((mesh.num_workers(), mesh.to_string().as_str()), (6, "(dp=2, pp=1, tp=3)"));
        let all: Vec<_> = (0..6).map(|worker| mesh.coordinates(WorkerId(worker)).unwrap()).collect();
        assert_eq!(all, [[0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 0, 0], [1, 0, 1], [1, 0, 2]]);
        for (worker, at) in (0..).zip(&all) {
            // In any order.
            let found = mesh.worker(&[("tp", at[2]), ("dp", at[0]), ("pp", at[1])]).unwrap();
            assert_eq!(found, WorkerId(worker));
        }
        let groupings: Vec<_> = mesh.groupings().map(|(_, grouping)| (grouping.size(), grouping.stride())).collect();
        assert_eq!(groupings, [(2, 3), (1, 1), (3, 1)]);
        assert_eq!(Mesh::new([("all", 4), ("none", 1)]).unwrap().group("all").unwrap(), Scope::World);
        assert_eq!(mesh.size("tp").unwrap(), 3);
    }

    #[test]
    fn an_error_says_which_axis_or_worker_there_is_not() {
        let mesh = Mesh::new([("dp", 2), ("tp", 2)]).unwrap();
        let texts = [
            mesh.group("pp").unwrap_err(),
            mesh.coordinates(WorkerId(4)).unwrap_err(),
            mesh.worker(&[("dp", 0)]).unwrap_err(),
            mesh.worker(&[("dp", 0), ("tp", 2)]).unwrap_err(),
            mesh.worker(&[("dp", 0), ("dp", 1), ("tp", 0)]).unwrap_err(),
        ]
        .map(|error| error.message().to_owned());
        assert_eq!(
            texts,
            [
                "the mesh (dp=2, tp=2) has no axis \"pp\"",
                "there is no worker 4 in the mesh (dp=2, tp=2)",
                "no coordinate on the axis \"tp\"",
                "no coordinate 2 on the axis \"tp\", which has 2 workers",
                "two coordinates on the axis \"dp\"",
            ]
        );
    }

    #[test]
    fn meshes_that_cannot_be_are_refused_here_and_from_a_peer() {
        let long = "x".repeat(MAX_NAME + 1);
        let many: Vec<String> = (0..=MAX_AXES).map(|number| number.to_string()).collect();
        let wrong: [(Vec<(&str, u32)>, &str); 7] = [
            (vec![], "1 to 8 axes, not 0"),
            (many.iter().map(|name| (name.as_str(), 1)).collect(), "1 to 8 axes, not 9"),
            (vec![("", 2)], "the name of an axis has 1 to 64 bytes, not 0"),
            (vec![(&long, 2)], "the name of an axis has 1 to 64 bytes, not 65"),
            (vec![("a", 0)], "the axis \"a\" has no workers"),
            (vec![("a", 1), ("b", 2), ("a", 2)], "two axes have the name \"a\""),
            (vec![("a", 1 << 16), ("b", 1 << 16)], "2^32 workers or more"),
        ];
        for (axes, why) in wrong {
            let error = Mesh::new(axes.iter().copied()).unwrap_err();
            assert!(error.message().contains(why), "{error}");
            let axes: Vec<_> =
                axes.iter().map(|(name, size)| serde_json::json!({"name": name, "size": size})).collect();
            let packed = rpc_core::Packed::encode(&serde_json::json!({"axes": axes})).unwrap();
            packed.decode::<Mesh>().unwrap_err();
        }
    }
}
