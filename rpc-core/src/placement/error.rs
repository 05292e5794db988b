//! Errors of planning: the reasons why a graph cannot be placed.

use std::fmt;

use crate::error::{ErrorKind, RpcError};

/// A constraint together with its source, for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The constraint, such as `cuda:0`.
    pub constraint: String,
    /// The edge that has the constraint, such as `call #1 'matmul'`.
    pub edge: String,
    /// Reason given by the code that added the constraint.
    pub reason: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.constraint, self.edge)?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, " ({})", self.reason) }
    }
}

/// Error of planning: the graph cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Two constraints on one location disagree.
    #[error("{edge} cannot be placed: {} and {} disagree on the {field}", .origins.0, .origins.1)]
    Conflict {
        /// The edge that has both constraints.
        edge: String,
        /// The field on which they disagree: `session`, `device type`, `device number`, `target` or
        /// `memory scope`.
        field: &'static str,
        /// The earlier constraint and the later one.
        origins: Box<(Origin, Origin)>,
    },
    /// No site has a device that satisfies all constraints on an edge.
    #[error("{edge} cannot be placed: no device is {wanted}, as required by {}; there are {available}", list(.origins))]
    NoDevice {
        /// The edge to be placed.
        edge: String,
        /// Constraint that the device has to satisfy.
        wanted: String,
        /// The constraints that contribute to it.
        origins: Vec<Origin>,
        /// The devices of all sites.
        available: String,
    },
    /// The graph itself is invalid.
    #[error("{0}")]
    Graph(String),
}

fn list(origins: &[Origin]) -> String {
    match origins {
        [] => "no constraint".to_owned(),
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
