//! The backends of collectives, by name.

use rpc_core::{DeviceType, Result, RpcError};
use serde::{Deserialize, Serialize};

/// Backend that carries the data of collectives among the workers of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Backend {
    /// The means between host memories: threads, segments, sockets.
    #[default]
    Host,
    /// MPI, between the same.
    Mpi,
    /// NVIDIA's NCCL, between the memories of GPUs.
    Nccl,
}

impl Backend {
    const ALL: [(&str, Self); 3] = [("host", Self::Host), ("mpi", Self::Mpi), ("nccl", Self::Nccl)];

    /// Returns the backend that users call `name`.
    pub(crate) fn named(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find_map(|(known, backend)| (known == name).then_some(backend)).ok_or_else(|| {
            let known = Self::ALL.map(|(known, _)| known).join(", ");
            RpcError::unsupported(format!("there is no backend of collectives called '{name}'; there are: {known}"))
        })
    }

    /// Returns the kind of the devices that hold its tensors.
    pub(crate) fn device_kind(self) -> DeviceType {
        match self {
            Self::Host | Self::Mpi => DeviceType::CPU,
            Self::Nccl => DeviceType::CUDA,
        }
    }
}
