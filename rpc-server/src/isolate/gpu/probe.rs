//! A probe of the devices with drivers of their own, in a process of its own.

use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{io, process, thread};

#[cfg(feature = "cuda")]
use rpc_core::device::DeviceState;
use rpc_core::device::{AllocRequest, Memory, Stream};
use rpc_core::{Device, DeviceApi, DeviceAttribute, DeviceType, Devices, ErrorKind, Result, RpcError, Value};
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
const MESSAGES: MessageFamily = MessageFamily::new("the answers of device probes", 4);

/// Answer of the process, printed as JSON.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// Version of the process: that of [`MESSAGES`].
    version: u32,
    /// Findings for each kind that the process was asked about, in that order.
    kinds: Vec<FoundKind>,
}

/// Result of a search for the devices of one kind.
#[derive(Serialize, Deserialize)]
struct FoundKind {
    kind: DeviceType,
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
#[derive(Clone, Serialize, Deserialize)]
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
    let args = program::args().skip(1).collect::<Vec<_>>();
    let Some((_, asked)) = args.split_first().filter(|(first, _)| *first == ARGUMENT) else { return };
    let kinds = asked.iter().filter_map(|kind| kind.to_str()?.parse().ok());
    let kinds = kinds.map(|kind| FoundKind { kind, found: find(kind) }).collect();
    let answer = Answer { version: MESSAGES.version(), kinds };
    let text = serde_json::to_vec(&answer).unwrap_or_default();
    let written = io::stdout().lock().write_all(&text);
    process::exit(i32::from(written.is_err()));
}

/// Looks for the devices of a kind, loading its driver.
fn find(kind: DeviceType) -> Found {
    let described = match kind {
        #[cfg(feature = "cuda")]
        DeviceType::CUDA => {
            rpc_cuda::CudaDevice::open().and_then(|cuda| describe_all(&cuda, |index| cuda.pci_bus_id(index).ok()))
        }
        #[cfg(feature = "opencl")]
        DeviceType::OPENCL => rpc_opencl::OpenClDevice::open().and_then(|opencl| describe_all(&opencl, |_| None)),
        _ => Err(RpcError::unsupported("this build has no support for it")),
    };
    match described {
        Ok(devices) => Found::Devices(devices),
        Err(error) => Found::Absent(error.message().to_owned()),
    }
}

fn describe_all(api: &dyn DeviceApi, pci_bus_id: impl Fn(i32) -> Option<String>) -> Result<Vec<Described>> {
    (0..api.count()?).map(|index| describe(api, index, pci_bus_id(index))).collect()
}

fn describe(api: &dyn DeviceApi, index: i32, pci_bus_id: Option<String>) -> Result<Described> {
    let text = |attribute| match api.attribute(index, attribute) {
        Ok(Value::Str(text)) => Ok(Some(text)),
        other => other.map(|_| None),
    };
    let memory_scopes = match api.attribute(index, DeviceAttribute::MemoryScopes)? {
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
        total_memory: match api.attribute(index, DeviceAttribute::TotalMemory)? {
            Value::Int(bytes) => Some(bytes),
            _ => None,
        },
        compute_version: text(DeviceAttribute::ComputeVersion)?,
        driver_version: text(DeviceAttribute::DriverVersion)?,
        target: text(DeviceAttribute::Target)?,
        memory_scopes,
        pci_bus_id,
    })
}

pub(super) fn probe(kinds: &[DeviceType]) -> Devices {
    let devices = Devices::new();
    if !ANSWERS.load(Ordering::Relaxed) {
        let reason =
            "this program does not look for it: its main does not call rpc_server::isolate::gpu::answer_if_asked";
        return kinds.iter().fold(devices, |devices, kind| devices.absent(*kind, reason));
    }
    match ask(kinds) {
        Ok(found) => kinds.iter().fold(devices, |devices, kind| with_found(devices, *kind, &found)),
        // The driver of one kind may have ended the process: the others can still be found.
        Err(error) if kinds.len() > 1 => {
            tracing::warn!(%error, "the probe of devices failed; each kind is looked for by itself");
            kinds.iter().fold(devices, |devices, kind| match ask(&[*kind]) {
                Ok(found) => with_found(devices, *kind, &found),
                Err(error) => with_failure(devices, *kind, &error),
            })
        }
        Err(error) => kinds.iter().fold(devices, |devices, kind| with_failure(devices, *kind, &error)),
    }
}

fn with_found(devices: Devices, kind: DeviceType, found: &[FoundKind]) -> Devices {
    match found.iter().find(|found| found.kind == kind).map(|found| &found.found) {
        Some(Found::Devices(all)) => devices.with(Arc::new(ProbedDevices { kind, all: all.clone() })),
        Some(Found::Absent(reason)) => devices.absent(kind, reason.as_str()),
        None => devices.absent(kind, "the process that looks for it did not answer for this kind"),
    }
}

fn with_failure(devices: Devices, kind: DeviceType, error: &io::Error) -> Devices {
    tracing::warn!(%kind, %error, "the probe of devices failed; there are none for sessions");
    devices.absent(kind, format!("the process that looks for it failed: {error}"))
}

fn ask(kinds: &[DeviceType]) -> io::Result<Vec<FoundKind>> {
    let mut command = Program::this().bare_command()?;
    command.arg(ARGUMENT).args(kinds.iter().map(ToString::to_string));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
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

fn read_answer(text: &[u8]) -> io::Result<Vec<FoundKind>> {
    let answer: Answer = versioned_json::decode(&MESSAGES, text, "that process", "this server")?;
    Ok(answer.kinds)
}

/// Descriptions of the devices of a kind. They cannot be used in this process.
struct ProbedDevices {
    kind: DeviceType,
    all: Vec<Described>,
}

impl ProbedDevices {
    fn refuse<T>(&self) -> Result<T> {
        let kind = self.kind;
        let text = format!("{kind} is for sessions with a process of their own: serve with --isolate process, or auto");
        Err(RpcError::new(ErrorKind::DeviceUnavailable, text))
    }
}

impl DeviceApi for ProbedDevices {
    fn kind(&self) -> DeviceType {
        self.kind
    }

    fn count(&self) -> Result<i32> {
        i32::try_from(self.all.len()).map_err(|_| RpcError::internal("more devices than can be counted"))
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        let found = usize::try_from(index).ok().and_then(|index| self.all.get(index));
        if attribute == DeviceAttribute::Exists {
            return Ok(found.is_some().into());
        }
        let Some(device) = found else {
            let text = format!("no {}: there are {}", Device::new(self.kind, index), self.all.len());
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

    /// Asks NVIDIA's management library, which has no context of CUDA, about GPUs of that kind.
    #[cfg(feature = "cuda")]
    fn state(&self, index: i32) -> DeviceState {
        if self.kind != DeviceType::CUDA {
            return DeviceState::default();
        }
        let found = usize::try_from(index).ok().and_then(|index| self.all.get(index));
        match found.and_then(|device| device.pci_bus_id.as_ref()) {
            Some(pci_bus_id) => rpc_cuda::nvml::gpu_state(pci_bus_id),
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
        let error = probe(&[DeviceType::CUDA]).get(Device::cuda(0)).err().unwrap();
        assert!(error.message().contains("does not call rpc_server::isolate::gpu::answer_if_asked"), "{error}");
    }

    #[test]
    fn answers_keep_their_bytes_and_others_are_refused_in_words() {
        let golden = r#"{"version":4,"kinds":[{"kind":4,"found":{"Absent":"there is no driver"}}]}"#;
        let found = Found::Absent("there is no driver".to_owned());
        let kinds = vec![FoundKind { kind: DeviceType::OPENCL, found }];
        assert_eq!(serde_json::to_string(&Answer { version: MESSAGES.version(), kinds }).unwrap(), golden);
        let read = read_answer(golden.as_bytes()).unwrap();
        let devices = with_found(Devices::new(), DeviceType::OPENCL, &read);
        assert!(devices.get(Device::opencl(0)).err().unwrap().message().contains("there is no driver"));
        let devices = with_found(devices, DeviceType::CUDA, &read);
        assert!(devices.get(Device::cuda(0)).err().unwrap().message().contains("did not answer for this kind"));
        let older = read_answer(br#"{"Absent":"there is no driver"}"#).err().unwrap().to_string();
        assert!(
            older.contains("version 1 of the answers of device probes") && older.contains("update that"),
            "{older}"
        );
        let newer = read_answer(br#"{"version":5,"devices":7}"#).err().unwrap().to_string();
        assert!(newer.contains("update this server"), "{newer}");
    }

    #[test]
    fn probed_devices_have_attributes_and_refuse_use() {
        let described = concat!(
            r#"[{"name":"H","total_memory":85899345920,"compute_version":"9.0","driver_version":null,"#,
            r#""target":"cuda -arch=sm_90","memory_scopes":["host"],"pci_bus_id":null}]"#
        );
        let all = serde_json::from_str(described).unwrap();
        let devices = Devices::new().with(Arc::new(ProbedDevices { kind: DeviceType::CUDA, all }));
        let gpu = devices.describe().find(|device| device.device == Device::cuda(0)).unwrap();
        assert!(gpu.satisfies(&"cuda,scope=host,target=cuda -arch=sm_90".parse().unwrap()), "{gpu}");
        assert_eq!(devices.attribute(Device::cuda(0), DeviceAttribute::WarpSize).unwrap(), Value::Null);
        assert_eq!(devices.attribute(Device::cuda(1), DeviceAttribute::Exists).unwrap(), Value::Bool(false));
        let api = devices.get(Device::cuda(0)).unwrap();
        let error = api.allocate(0, &AllocRequest::new(1)).err().unwrap();
        assert!(error.message().contains("--isolate process"), "{error}");
    }
}
