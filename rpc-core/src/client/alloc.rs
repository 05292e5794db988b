//! Allocation of tensors: on a device, or on one that satisfies a [`VirtualDevice`].

use crate::client::action::{Action, OneRequest, Options, ScopedAction};
use crate::client::references::RemoteTensor;
use crate::client::session::Session;
use crate::device::virtual_device::GLOBAL;
use crate::device::{DeviceAttribute, DeviceDescription, VirtualDevice};
use crate::dlpack::{DataType, Device, DeviceType};
use crate::error::{ErrorKind, Result, RpcError};
use crate::session::Operation;
use crate::value::Value;

/// Largest number of devices of one kind that are asked about.
const MAX_DEVICES: i32 = 1024;

/// Number of devices in a row that are not there after which none is expected. A client whose
/// rights leave some out does not see those.
const MAX_GAP: i32 = 16;

/// Largest number of devices that an error names.
const MAX_NAMED: usize = 16;

/// Place of an allocation: a device, or a constraint that the session's devices are asked about.
#[derive(Clone, Debug)]
pub struct AllocDevice(Place);

#[derive(Clone, Debug)]
enum Place {
    Device(Device),
    Constraint(VirtualDevice),
}

impl From<Device> for AllocDevice {
    fn from(device: Device) -> Self {
        Self(Place::Device(device))
    }
}

impl From<VirtualDevice> for AllocDevice {
    fn from(device: VirtualDevice) -> Self {
        Self(Place::Constraint(device))
    }
}

impl From<&VirtualDevice> for AllocDevice {
    fn from(device: &VirtualDevice) -> Self {
        device.clone().into()
    }
}

impl Session {
    /// Allocates a zeroed, densely packed tensor, on a [`Device`] or a [`VirtualDevice`].
    ///
    /// Of a virtual device, type and number name the device and the memory scope its memory. If the
    /// type or the number is unconstrained, the tensor is on the first device of the session that
    /// satisfies the constraint, in the order of numbers; devices of type `cpu` come first. The
    /// session's devices are asked for their attributes only where the constraint leaves a choice,
    /// or names a target or a memory scope.
    ///
    /// ```
    /// use rpc_core::{DataType, LocalSession, Registry, Session, VirtualDevice};
    ///
    /// let session = Session::new(LocalSession::new(Registry::new()));
    /// let anywhere: VirtualDevice = "*,scope=host".parse()?;
    /// let tensor = session.alloc(&anywhere, DataType::F32, &[2, 3]).wait()?;
    /// assert_eq!(tensor.device().to_string(), "cpu:0");
    /// # Ok::<(), rpc_core::RpcError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`], also if no device satisfies the constraint;
    /// [`ErrorKind::OutOfMemory`], [`ErrorKind::LimitExceeded`], and
    /// [`ErrorKind::InvalidArgument`] for an impossible shape.
    pub fn alloc(&self, on: impl Into<AllocDevice>, dtype: DataType, shape: &[i64]) -> Action<RemoteTensor> {
        self.alloc_aligned(on, dtype, shape, 0)
    }

    /// Allocates like [`alloc`](Self::alloc), in a memory scope of the device, such as `global`.
    pub fn alloc_in_scope(
        &self,
        device: Device,
        dtype: DataType,
        shape: &[i64],
        scope: Option<&str>,
    ) -> Action<RemoteTensor> {
        self.alloc_exactly(device, dtype, shape.to_vec(), scope.map(str::to_owned), 0)
    }

    /// Allocates like [`alloc`](Self::alloc), at an address of the device that is a multiple of
    /// `alignment` bytes, a power of two. Zero leaves the alignment to the device.
    ///
    /// The alignment counts against the session's memory if it is larger than 64 bytes.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc); [`ErrorKind::InvalidArgument`] for an alignment that is not a
    /// power of two, or larger than the device's
    /// [`MaxAlignment`](crate::DeviceAttribute::MaxAlignment); [`ErrorKind::Unsupported`] if the
    /// server is too old to know alignments.
    pub fn alloc_aligned(
        &self,
        on: impl Into<AllocDevice>,
        dtype: DataType,
        shape: &[i64],
        alignment: u64,
    ) -> Action<RemoteTensor> {
        let shape = shape.to_vec();
        let wanted = match on.into().0 {
            Place::Device(device) => return self.alloc_exactly(device, dtype, shape, None, alignment),
            Place::Constraint(wanted) => wanted,
        };
        let scope = wanted.memory_scope().map(str::to_owned);
        if let (Some(device), None, None) = (wanted.to_device(), wanted.target(), &scope) {
            return self.alloc_exactly(device, dtype, shape, None, alignment);
        }
        let session = self.clone();
        ScopedAction::steps(async move |options: Options<'static>| {
            let device = session.choose_device(&wanted, &options).await?;
            options.apply(session.alloc_exactly(device, dtype, shape, scope, alignment)).await
        })
    }

    fn alloc_exactly(
        &self,
        device: Device,
        dtype: DataType,
        shape: Vec<i64>,
        scope: Option<String>,
        alignment: u64,
    ) -> Action<RemoteTensor> {
        OneRequest::new(self.shared(), Ok(Operation::Alloc { device, dtype, shape, scope, alignment })).into()
    }

    /// Returns the first device that satisfies a constraint.
    async fn choose_device(&self, wanted: &VirtualDevice, options: &Options<'_>) -> Result<Device> {
        let kinds = match wanted.device_type() {
            Some(kind) => vec![kind],
            None => {
                let others = DeviceType::KNOWN.iter().filter(|kind| **kind != DeviceType::CPU);
                std::iter::once(&DeviceType::CPU).chain(others).copied().collect()
            }
        };
        let needs_description = wanted.target().is_some() || wanted.memory_scope().is_some_and(|scope| scope != GLOBAL);
        let (mut others, mut failure) = (Vec::new(), None);
        for kind in kinds {
            let mut missing = 0;
            let numbers = wanted.virtual_device_id().map_or(0..MAX_DEVICES, |number| number..number.saturating_add(1));
            for device in numbers.map(|number| Device::new(kind, number)) {
                let ask = |attribute| options.apply(self.attribute(device, attribute));
                if ask(DeviceAttribute::Exists).await? != Value::Bool(true) {
                    missing += 1;
                    if missing == MAX_GAP {
                        break;
                    }
                    continue;
                }
                missing = 0;
                if !needs_description {
                    return Ok(device);
                }
                let described = async {
                    let target = ask(DeviceAttribute::Target).await?;
                    DeviceDescription::from_attributes(device, target, ask(DeviceAttribute::MemoryScopes).await?)
                };
                let description = match described.await {
                    Ok(description) => description,
                    Err(error) if error.ends_session() => return Err(error),
                    // Another one may do.
                    Err(error) => {
                        failure = Some(error);
                        continue;
                    }
                };
                if description.satisfies(wanted) {
                    return Ok(device);
                }
                if others.len() < MAX_NAMED {
                    others.push(description.to_string());
                }
            }
        }
        if let (Some(error), true) = (failure, others.is_empty()) {
            return Err(error.context(format_args!("looking for {wanted}")));
        }
        let found = if others.is_empty() { "none of that kind and number".to_owned() } else { others.join(", ") };
        Err(RpcError::new(ErrorKind::DeviceUnavailable, format!("no device is {wanted}; there are {found}")))
    }
}
