//! The set of devices that a session offers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::api::{DeviceApi, out_of_range};
use super::attribute::DeviceAttribute;
use super::cpu::CpuDevice;
use super::target::Target;
use super::virtual_device::{DeviceDescription, VirtualDevice};
use crate::access_control::{AccessControl, Permission};
use crate::dlpack::{Device, DeviceType};
use crate::error::{ErrorKind, Result, RpcError};
use crate::value::Value;

/// Devices that a session offers, by kind.
///
/// A missing kind can carry the reason, so that the error for `cuda` says that the driver was not
/// found, and not only that there is no such device.
#[derive(Clone)]
pub struct Devices {
    kinds: BTreeMap<DeviceType, Result<Arc<dyn DeviceApi>, String>>,
    /// Rights of the client, which may use some of the devices only.
    access: Option<Arc<dyn AccessControl>>,
}

impl Devices {
    /// Returns a set with only `cpu`, with the [`SystemAllocator`](super::SystemAllocator).
    pub fn new() -> Self {
        Self { kinds: BTreeMap::new(), access: None }.with(Arc::new(CpuDevice::default()))
    }

    /// Adds `api`, replacing any other of its kind. For example, this gives `cpu` another
    /// allocator.
    #[must_use]
    pub fn with(mut self, api: Arc<dyn DeviceApi>) -> Self {
        self.kinds.insert(api.kind(), Ok(api));
        self
    }

    /// Records the reason why `kind` is not offered.
    #[must_use]
    pub fn absent(mut self, kind: DeviceType, reason: impl Into<String>) -> Self {
        self.kinds.insert(kind, Err(reason.into()));
        self
    }

    /// Limits the set to the devices that a client may use.
    #[must_use]
    pub(crate) fn within(mut self, access: Arc<dyn AccessControl>) -> Self {
        self.access = Some(access);
        self
    }

    /// Returns the API that serves `device`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] with the reason, if the kind is not offered or the index is
    /// out of range; [`ErrorKind::Refused`] if the client of the session may not use the device.
    pub fn get(&self, device: Device) -> Result<&Arc<dyn DeviceApi>> {
        self.authorize(device)?;
        let api = self.kind(device.kind)?;
        let count = api.count()?;
        if (0..count).contains(&device.index) { Ok(api) } else { Err(out_of_range(device, count)) }
    }

    /// Returns the API for the devices of `kind`, even if there are none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] with the reason, if the kind is not offered.
    pub fn kind(&self, kind: DeviceType) -> Result<&Arc<dyn DeviceApi>> {
        let unavailable = |reason: &str| RpcError::new(ErrorKind::DeviceUnavailable, format!("no {kind}: {reason}"));
        match self.kinds.get(&kind) {
            Some(Ok(api)) => Ok(api),
            Some(Err(reason)) => Err(unavailable(reason)),
            None => Err(unavailable("this session does not offer it")),
        }
    }

    /// Returns the value of `attribute` of `device`. [`DeviceAttribute::Exists`] is answered for
    /// every device, existing or not.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] for any other attribute of a device that does not exist;
    /// [`ErrorKind::Refused`] for one that the client may not use.
    pub fn attribute(&self, device: Device, attribute: DeviceAttribute) -> Result<Value> {
        match self.get(device) {
            Ok(api) => api.attribute(device.index, attribute),
            Err(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(false)),
            Err(error) => Err(error),
        }
    }

    /// Returns descriptions of the devices that the client may use, of all kinds, for matching
    /// constraints. A device that fails to describe itself counts as one of its type without
    /// further properties. Drivers may take long.
    pub fn describe(&self) -> impl Iterator<Item = DeviceDescription> {
        let of_kind = move |(kind, api): (DeviceType, Result<&Arc<dyn DeviceApi>, &str>)| {
            let count = api.map_or(0, |api| api.count().unwrap_or(0));
            let devices = (0..count).map(move |index| Device::new(kind, index));
            devices.filter(|device| self.authorize(*device).is_ok()).map(|device| self.describe_one(device))
        };
        self.iter().flat_map(of_kind)
    }

    /// Checks that the client may use `device`.
    fn authorize(&self, device: Device) -> Result<()> {
        self.access.as_ref().map_or(Ok(()), |access| access.check(&Permission::Device(device)))
    }

    fn describe_one(&self, device: Device) -> DeviceDescription {
        let attribute = |attribute| self.attribute(device, attribute);
        let described = attribute(DeviceAttribute::Target)
            .and_then(|target| Ok((target, attribute(DeviceAttribute::MemoryScopes)?)))
            .and_then(|(target, scopes)| DeviceDescription::from_attributes(device, target, scopes));
        described.unwrap_or_else(|error| {
            crate::log_limited!(WARN, %device, %error, "a device did not report its target and memory scopes");
            DeviceDescription { device, target: Target::of_device(device.kind), memory_scopes: Vec::new() }
        })
    }

    /// Returns a device that satisfies a constraint: `preferred` if it does, otherwise the first
    /// one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`], with a list of the devices.
    pub fn choose(&self, wanted: &VirtualDevice, preferred: Device) -> Result<Device> {
        // An empty constraint needs no question to the driver.
        if wanted.is_fully_unconstrained()
            || (self.get(preferred).is_ok() && self.describe_one(preferred).satisfies(wanted))
        {
            return Ok(preferred);
        }
        let found = self.describe().find(|device| device.satisfies(wanted));
        found.map(|device| device.device).ok_or_else(|| {
            let devices = self.describe().map(|device| device.to_string()).collect::<Vec<_>>().join(", ");
            RpcError::new(ErrorKind::DeviceUnavailable, format!("no device is {wanted}; there are {devices}"))
        })
    }

    /// Returns every kind that is offered or known to be absent, by number, with its API or the
    /// reason.
    pub fn iter(&self) -> impl Iterator<Item = (DeviceType, Result<&Arc<dyn DeviceApi>, &str>)> {
        self.kinds.iter().map(|(kind, api)| (*kind, api.as_ref().map_err(String::as_str)))
    }
}

impl Default for Devices {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(kind, api)| (kind.to_string(), api.map(|api| api.count())))).finish()
    }
}
