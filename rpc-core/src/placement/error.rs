//! Why a graph cannot be placed.

use std::fmt;

use crate::error::{ErrorKind, RpcError};

/// A constraint, and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// What was asked for, such as `cuda:0`.
    pub constraint: String,
    /// What it was asked for, such as `call #1 'matmul'`.
    pub edge: String,
    /// In the words of whoever put it there.
    pub reason: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.constraint, self.edge)?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, " ({})", self.reason) }
    }
}

/// Why a graph cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Two constraints on one place disagree.
    #[error("{edge} cannot be placed: {} and {} disagree on the {field}", .origins.0, .origins.1)]
    Conflict {
        /// What has both.
        edge: String,
        /// What they disagree on: `session`, `device type`, `device number`, `target` or `memory scope`.
        field: &'static str,
        /// The one that was there first, and the other one.
        origins: Box<(Origin, Origin)>,
    },
    /// No site has a device that satisfies all constraints on a place.
    #[error("{edge} cannot be placed: no device is {wanted}, as {} asked; there are {there_are}", list(.origins))]
    NoDevice {
        /// What has to be placed.
        edge: String,
        /// What the device would have to be.
        wanted: String,
        /// Who wants it to be so.
        origins: Vec<Origin>,
        /// The devices of all sites.
        there_are: String,
    },
    /// The graph is wrong in itself.
    #[error("{0}")]
    Graph(String),
}

fn list(origins: &[Origin]) -> String {
    match origins {
        [] => "nobody".to_owned(),
        origins => origins.iter().map(Origin::to_string).collect::<Vec<_>>().join(" and "),
    }
}

impl From<PlacementError> for RpcError {
    fn from(error: PlacementError) -> Self {
        let kind = match error {
            PlacementError::NoDevice { .. } => ErrorKind::DeviceUnavailable,
            PlacementError::Conflict { .. } | PlacementError::Graph(_) => ErrorKind::InvalidArgument,
        };
        Self::new(kind, error.to_string())
    }
}
