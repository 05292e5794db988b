//! Assignment of processes to cores.

use rpc_server::cli::Failure;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::Pin;

/// Cores of the processes; `None` leaves the choice to the system.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoreAssignment {
    pub(super) client: Option<usize>,
    pub(super) server: Option<usize>,
    pub(super) hop: Option<usize>,
}

impl CoreAssignment {
    /// Assigns cores among those that this process may use.
    pub(super) fn choose(pin: Pin) -> Result<Self, Failure> {
        if pin == Pin::None {
            return Ok(Self { client: None, server: None, hop: None });
        }
        let allowed = sched_getaffinity(None).map_err(|error| failed(error.into()))?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
        let core = |at: usize| cores.get(at % cores.len().max(1)).copied();
        match pin {
            Pin::Split if cores.len() < 2 => Err(Failure::Usage("--pin split needs two cores".to_owned())),
            Pin::Split => Ok(Self { client: core(0), server: core(1), hop: core(2) }),
            Pin::Same | Pin::None => Ok(Self { client: core(0), server: core(0), hop: core(0) }),
        }
    }
}

/// Pins the calling thread, and all threads that it starts later, to `core`.
pub(super) fn pin_thread(core: Option<usize>) -> Result<(), Failure> {
    let Some(core) = core else { return Ok(()) };
    let mut set = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|error| failed(error.into()))
}

fn failed(source: std::io::Error) -> Failure {
    Failure::local("cannot choose the core", source)
}
