//! A probe of the GPUs in a process of its own.

use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{io, process, thread};

use rpc_core::device::{AllocRequest, DeviceState, Memory, Stream};
use rpc_core::{Device, DeviceApi, DeviceAttribute, DeviceType, Devices, ErrorKind, Result, RpcError, Value};
use rpc_cuda::{CudaDevice, nvml};
use rpc_transports::MessageFamily;
use rpc_transports::program::{self, Program};
use serde::{Deserialize, Serialize};

use crate::versioned_json;

/// First argument of the process that probes devices.
const ARGUMENT: &str = "--describe-devices";

/// Longest time for the driver. Some machines with many GPUs need several seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum length of an answer, in bytes.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// Answers of processes that probe devices.
const MESSAGES: MessageFamily = MessageFamily::new("the answers of device probes", 3);

/// Answer of the process, printed as JSON.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// Version of the process: that of [`MESSAGES`].
    version: u32,
    found: Found,
}

/// Result of a search for devices.
#[derive(Serialize, Deserialize)]
enum Found {
    Devices(Vec<Described>),
    /// Reason for which there are no devices.
    Absent(String),
}

/// Description of one device.
#[derive(Serialize, Deserialize)]
struct Described {
    name: Option<String>,
    total_memory: Option<i64>,
    compute_version: Option<String>,
    driver_version: Option<String>,
    target: Option<String>,
    memory_scopes: Vec<String>,
    /// Place on the PCI bus, by which NVIDIA's management library knows the device.
    pci_bus_id: Option<String>,
}

/// True once `main` has called the hook. A program without the hook would start itself endlessly.
static ANSWERS: AtomicBool = AtomicBool::new(false);

pub(super) fn answer_if_asked() {
    ANSWERS.store(true, Ordering::Relaxed);
    if program::args().nth(1).is_none_or(|first| first != ARGUMENT) {
        return;
    }
    let found = match CudaDevice::open().and_then(|cuda| describe_all(&cuda)) {
        Ok(devices) => Found::Devices(devices),
        Err(error) => Found::Absent(error.message().to_owned()),
    };
    let answer = Answer { version: MESSAGES.version(), found };
    let text = serde_json::to_vec(&answer).unwrap_or_default();
    let written = io::stdout().lock().write_all(&text);
    process::exit(i32::from(written.is_err()));
}

fn describe_all(cuda: &CudaDevice) -> Result<Vec<Described>> {
    (0..cuda.count()?).map(|index| describe(cuda, index)).collect()
}

fn describe(cuda: &CudaDevice, index: i32) -> Result<Described> {
    let text = |attribute| match cuda.attribute(index, attribute) {
        Ok(Value::Str(text)) => Ok(Some(text)),
        other => other.map(|_| None),
    };
    let memory_scopes = match cuda.attribute(index, DeviceAttribute::MemoryScopes)? {
        Value::List(scopes) => scopes
            .into_iter()
            .filter_map(|scope| match scope {
                Value::Str(scope) => Some(scope),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    Ok(Described {
        name: text(DeviceAttribute::Name)?,
        total_memory: match cuda.attribute(index, DeviceAttribute::TotalMemory)? {
            Value::Int(bytes) => Some(bytes),
            _ => None,
        },
        compute_version: text(DeviceAttribute::ComputeVersion)?,
        driver_version: text(DeviceAttribute::DriverVersion)?,
        target: text(DeviceAttribute::Target)?,
        memory_scopes,
        pci_bus_id: cuda.pci_bus_id(index).ok(),
    })
}

pub(super) fn probe() -> Devices {
    let devices = Devices::new();
    if !ANSWERS.load(Ordering::Relaxed) {
        let reason =
            "this program does not look for it: its main does not call rpc_server::isolate::gpu::answer_if_asked";
        return devices.absent(DeviceType::CUDA, reason);
    }
    match ask() {
        Ok(Found::Devices(all)) => devices.with(Arc::new(ProbedCuda(all))),
        Ok(Found::Absent(reason)) => devices.absent(DeviceType::CUDA, reason),
        Err(error) => {
            tracing::warn!(%error, "the probe of GPUs failed; there are none for sessions");
            devices.absent(DeviceType::CUDA, format!("the process that looks for it failed: {error}"))
        }
    }
}

fn ask() -> io::Result<Found> {
    let mut command = Program::this().bare_command()?;
    command.arg(ARGUMENT).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    let Some(output) = child.stdout.take() else { return Err(io::Error::other("it has no output")) };
    let (sender, receiver) = mpsc::channel();
    let read = move || {
        let mut text = Vec::new();
        let outcome = output.take(MAX_ANSWER_BYTES).read_to_end(&mut text).map(|_| text);
        // A late answer has no receiver any more.
        _ = sender.send(outcome);
    };
    thread::Builder::new().name("rpc-probe".into()).spawn(read)?;
    let answer = receiver.recv_timeout(PROBE_TIMEOUT);
    // The process has answered, or never will. A driver that hangs in the kernel blocks only that
    // process.
    let status = match answer {
        Ok(_) => child.wait()?,
        Err(_) => {
            child.kill()?;
            // Its end may take long.
            thread::Builder::new().name("rpc-probe".into()).spawn(move || child.wait())?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {PROBE_TIMEOUT:?}")));
        }
    };
    let text = answer.unwrap_or_else(|error| Err(io::Error::other(error)))?;
    if !status.success() {
        return Err(io::Error::other(format!("it ended with {status}")));
    }
    read_answer(&text)
}

fn read_answer(text: &[u8]) -> io::Result<Found> {
    let answer: Answer = versioned_json::decode(&MESSAGES, text, "that process", "this server")?;
    Ok(answer.found)
}

/// Descriptions of CUDA devices. They cannot be used in this process.
struct ProbedCuda(Vec<Described>);

impl ProbedCuda {
    fn refuse<T>(&self) -> Result<T> {
        let text = "cuda is for sessions with a process of their own: serve with --isolate process, or auto";
        Err(RpcError::new(ErrorKind::DeviceUnavailable, text))
    }
}

impl DeviceApi for ProbedCuda {
    fn kind(&self) -> DeviceType {
        DeviceType::CUDA
    }

    fn count(&self) -> Result<i32> {
        i32::try_from(self.0.len()).map_err(|_| RpcError::internal("more devices than can be counted"))
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        let found = usize::try_from(index).ok().and_then(|index| self.0.get(index));
        if attribute == DeviceAttribute::Exists {
            return Ok(found.is_some().into());
        }
        let Some(device) = found else {
            let text = format!("no {}: there are {}", Device::cuda(index), self.0.len());
            return Err(RpcError::new(ErrorKind::DeviceUnavailable, text));
        };
        Ok(match attribute {
            DeviceAttribute::Name => device.name.clone().into(),
            DeviceAttribute::TotalMemory => device.total_memory.into(),
            DeviceAttribute::ComputeVersion => device.compute_version.clone().into(),
            DeviceAttribute::DriverVersion => device.driver_version.clone().into(),
            DeviceAttribute::Target => device.target.clone().into(),
            DeviceAttribute::MemoryScopes => {
                Value::List(device.memory_scopes.iter().cloned().map(Value::Str).collect())
            }
            _ => Value::Null,
        })
    }

    /// Asks NVIDIA's management library, which has no context of CUDA.
    fn state(&self, index: i32) -> DeviceState {
        let found = usize::try_from(index).ok().and_then(|index| self.0.get(index));
        match found.and_then(|device| device.pci_bus_id.as_ref()) {
            Some(pci_bus_id) => nvml::gpu_state(pci_bus_id),
            None => DeviceState::unknown("the driver does not tell where the device is on the PCI bus"),
        }
    }

    fn allocate(&self, _: i32, _: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        self.refuse()
    }

    fn create_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        self.refuse()
    }

    fn default_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        self.refuse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_the_hook_is_not_started_for_a_probe() {
        let error = probe().get(Device::cuda(0)).err().unwrap();
        assert!(error.message().contains("does not call rpc_server::isolate::gpu::answer_if_asked"), "{error}");
    }

    #[test]
    fn answers_keep_their_bytes_and_others_are_refused_in_words() {
        let golden = r#"{"version":3,"found":{"Absent":"there is no driver"}}"#;
        let found = Found::Absent("there is no driver".to_owned());
        assert_eq!(serde_json::to_string(&Answer { version: MESSAGES.version(), found }).unwrap(), golden);
        assert!(matches!(read_answer(golden.as_bytes()), Ok(Found::Absent(reason)) if reason == "there is no driver"));
        let older = read_answer(br#"{"Absent":"there is no driver"}"#).err().unwrap().to_string();
        assert!(
            older.contains("version 1 of the answers of device probes") && older.contains("update that"),
            "{older}"
        );
        let newer = read_answer(br#"{"version":4,"devices":7}"#).err().unwrap().to_string();
        assert!(newer.contains("update this server"), "{newer}");
    }

    #[test]
    fn probed_devices_have_attributes_and_refuse_use() {
        let described = concat!(
            r#"[{"name":"H","total_memory":85899345920,"compute_version":"9.0","driver_version":null,"#,
            r#""target":"cuda -arch=sm_90","memory_scopes":["host"],"pci_bus_id":null}]"#
        );
        let devices = Devices::new().with(Arc::new(ProbedCuda(serde_json::from_str(described).unwrap())));
        let gpu = devices.describe().find(|device| device.device == Device::cuda(0)).unwrap();
        assert!(gpu.satisfies(&"cuda,scope=host,target=cuda -arch=sm_90".parse().unwrap()), "{gpu}");
        assert_eq!(devices.attribute(Device::cuda(0), DeviceAttribute::WarpSize).unwrap(), Value::Null);
        assert_eq!(devices.attribute(Device::cuda(1), DeviceAttribute::Exists).unwrap(), Value::Bool(false));
        let api = devices.get(Device::cuda(0)).unwrap();
        let error = api.allocate(0, &AllocRequest::new(1)).err().unwrap();
        assert!(error.message().contains("--isolate process"), "{error}");
    }
}
