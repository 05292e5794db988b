//! Device constraints and descriptions: [`VirtualDevice`], which programs pass around until a
//! device is chosen, and [`DeviceDescription`], by which servers describe their devices.
//!
//! The semantics are those of TVM's class of the same name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::device::target::Target;
use crate::dlpack::{Device, DeviceType};
use crate::error::{Result, RpcError};
use crate::value::Value;

/// Memory scope that every device has: its ordinary memory.
pub const GLOBAL: &str = "global";

/// Constraint on the location of data or code: the type of device, its number among those of that
/// type, the target of its code, and the memory scope. Each may be unconstrained. A target
/// determines the type of device, so that the two always agree.
///
/// The number is virtual: the user of the constraint decides its meaning. A tracker,
/// [`placement`](crate::placement) and workers take it as the device's index.
///
/// Written `cuda:0,scope=global,target=cuda -arch=sm_90`: type and number, of which `*` is
/// unconstrained (`cuda`, `*:1` and `*`), then the scope, then the target, which takes the rest of
/// the text.
///
/// ```
/// use rpc_core::VirtualDevice;
///
/// let on_the_processor: VirtualDevice = "cpu,target=llvm".parse()?;
/// let third: VirtualDevice = "*:3,scope=global".parse()?;
/// let joined = on_the_processor.join(&third);
/// assert_eq!(joined, Some("cpu:3,scope=global,target=llvm".parse()?));
/// assert_eq!(on_the_processor.join(&"cuda".parse()?), None);
/// # Ok::<(), rpc_core::RpcError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct VirtualDevice {
    device_type: Option<DeviceType>,
    virtual_device_id: Option<i32>,
    target: Option<Target>,
    memory_scope: Option<String>,
}

impl VirtualDevice {
    /// Returns a value without any constraint, like [`Default`].
    pub fn unconstrained() -> Self {
        Self::default()
    }

    /// Returns a builder that sets fields one by one.
    pub fn builder() -> VirtualDeviceBuilder {
        VirtualDeviceBuilder::default()
    }

    /// Creates a value from fields that are known to be valid, such as those of joined devices.
    pub(crate) fn of_agreeing(
        device_type: Option<DeviceType>,
        virtual_device_id: Option<i32>,
        target: Option<Target>,
        memory_scope: Option<String>,
    ) -> Self {
        Self { device_type, virtual_device_id, target, memory_scope }
    }

    /// Returns the type of device; with a target, that of the target.
    pub fn device_type(&self) -> Option<DeviceType> {
        self.device_type
    }

    /// Returns the number among the devices of its type, from 0.
    pub fn virtual_device_id(&self) -> Option<i32> {
        self.virtual_device_id
    }

    /// Returns the target that code is compiled for.
    pub fn target(&self) -> Option<&Target> {
        self.target.as_ref()
    }

    /// Returns the memory scope of data on the device.
    pub fn memory_scope(&self) -> Option<&str> {
        self.memory_scope.as_deref()
    }

    /// Returns true if no field is constrained.
    pub fn is_fully_unconstrained(&self) -> bool {
        *self == Self::default()
    }

    /// Returns true if target (and with it the type of device), number and memory scope are all
    /// constrained.
    pub fn is_fully_constrained(&self) -> bool {
        self.target.is_some() && self.virtual_device_id.is_some() && self.memory_scope.is_some()
    }

    /// Returns the device that is meant, which need not exist; `None` unless type and number are
    /// constrained.
    pub fn to_device(&self) -> Option<Device> {
        Some(Device::new(self.device_type?, self.virtual_device_id?))
    }

    /// Returns all constraints of both; `None` if they disagree. The order of joins does not
    /// matter.
    pub fn join(&self, other: &Self) -> Option<Self> {
        Some(Self {
            device_type: agree(&self.device_type, &other.device_type)?,
            virtual_device_id: agree(&self.virtual_device_id, &other.virtual_device_id)?,
            // The device types are derived from the targets, so they agree if the targets do.
            target: agree(&self.target, &other.target)?,
            memory_scope: agree(&self.memory_scope, &other.memory_scope)?,
        })
    }

    /// Returns true if a device with these properties satisfies the constraint, see
    /// [`DeviceDescription::satisfies`]. A device without a target has that [of its
    /// type](Target::of_device).
    pub fn is_satisfied_by(&self, device: Device, target: Option<&Target>, memory_scopes: &[String]) -> bool {
        let is_provided = |wanted: &Target| match target {
            Some(target) => target.provides(wanted),
            None => Target::of_device(device.kind).provides(wanted),
        };
        self.device_type.is_none_or(|device_type| device_type == device.kind)
            && self.virtual_device_id.is_none_or(|id| id == device.index)
            && self.memory_scope.as_ref().is_none_or(|scope| scope == GLOBAL || memory_scopes.contains(scope))
            && self.target.as_ref().is_none_or(is_provided)
    }

    /// Returns these constraints, with unconstrained fields taken from `other`. No constraint is
    /// overridden: if the type of device is constrained, `other`'s target is dropped unless it is
    /// for that type.
    #[must_use]
    pub fn default_to(&self, other: &Self) -> Self {
        let device_type = self.device_type.or(other.device_type);
        let fits = |target: &&Target| Some(target.device_type()) == device_type;
        Self {
            device_type,
            virtual_device_id: self.virtual_device_id.or(other.virtual_device_id),
            target: self.target.clone().or_else(|| other.target.as_ref().filter(fits).cloned()),
            memory_scope: self.memory_scope.clone().or_else(|| other.memory_scope.clone()),
        }
    }
}

/// Field of a [`VirtualDevice`], for programs that show or ask for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldInfo {
    /// Name, as [`VirtualDeviceBuilder::field`] and serde take it.
    pub name: &'static str,
    /// Type of the value, with its written form.
    pub type_name: &'static str,
    /// Meaning of the field, and of its absence.
    pub description: &'static str,
}

impl VirtualDevice {
    /// Fields with their types and descriptions, in the order of
    /// [`VirtualDeviceBuilder::FIELDS`].
    pub const FIELD_INFOS: [FieldInfo; 4] = [
        FieldInfo {
            name: "device_type",
            type_name: "name of a type of device, such as cuda",
            description: "Type of the device. Absent: any, unless the target determines it.",
        },
        FieldInfo {
            name: "virtual_device_id",
            type_name: "number from 0",
            description: "Number of the device among those of its type, to which the user of the constraint \
                          assigns a physical one. Absent: any.",
        },
        FieldInfo {
            name: "target",
            type_name: "target, such as cuda -arch=sm_90",
            description: "Target that code for the device is compiled for; its type of device is that of the \
                          constraint. Absent: any.",
        },
        FieldInfo {
            name: "memory_scope",
            type_name: "text without white space and commas",
            description: "Scope of the memory of the device that holds the data. Absent: any, which is the \
                          ordinary memory where data is allocated.",
        },
    ];

    /// Returns the constrained fields, each with its value in the form that
    /// [`VirtualDeviceBuilder::field`] takes.
    ///
    /// ```
    /// let device: rpc_core::VirtualDevice = "cuda:1,scope=global".parse()?;
    /// let fields = device.constrained_fields();
    /// let fields = fields.map(|(field, value)| format!("{}={value}", field.name));
    /// let expected = ["device_type=cuda", "virtual_device_id=1", "memory_scope=global"];
    /// assert_eq!(fields.collect::<Vec<_>>(), expected);
    /// # Ok::<(), rpc_core::RpcError>(())
    /// ```
    pub fn constrained_fields(&self) -> impl Iterator<Item = (&'static FieldInfo, String)> {
        const INFOS: &[FieldInfo] = &VirtualDevice::FIELD_INFOS;
        let values = [
            self.device_type.map(|device_type| device_type.to_string()),
            self.virtual_device_id.map(|id| id.to_string()),
            self.target.as_ref().map(Target::to_string),
            self.memory_scope.clone(),
        ];
        INFOS.iter().zip(values).filter_map(|(info, value)| Some((info, value?)))
    }
}

/// Merges two optional values. Returns `None` if both are set and differ.
fn agree<T: Clone + PartialEq>(a: &Option<T>, b: &Option<T>) -> Option<Option<T>> {
    match (a, b) {
        (Some(a), Some(b)) if a != b => None,
        (Some(one), _) | (None, Some(one)) => Some(Some(one.clone())),
        (None, None) => Some(None),
    }
}

impl From<Device> for VirtualDevice {
    /// Returns the device, with any target and in any memory; any device of its type if its index
    /// is negative.
    fn from(device: Device) -> Self {
        let virtual_device_id = (device.index >= 0).then_some(device.index);
        Self { device_type: Some(device.kind), virtual_device_id, ..Self::default() }
    }
}

impl From<Option<Device>> for VirtualDevice {
    /// Returns the device's constraint; unconstrained for `None`.
    fn from(device: Option<Device>) -> Self {
        device.map_or_else(Self::default, Self::from)
    }
}

impl From<DeviceType> for VirtualDevice {
    /// Returns any device of this type.
    fn from(device_type: DeviceType) -> Self {
        Self { device_type: Some(device_type), ..Self::default() }
    }
}

impl From<Target> for VirtualDevice {
    /// Returns any device that runs code of this target.
    fn from(target: Target) -> Self {
        Self { device_type: Some(target.device_type()), target: Some(target), ..Self::default() }
    }
}

impl fmt::Display for VirtualDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device_type {
            Some(device_type) => write!(f, "{device_type}")?,
            None => f.write_str("*")?,
        }
        if let Some(id) = self.virtual_device_id {
            write!(f, ":{id}")?;
        }
        if let Some(scope) = &self.memory_scope {
            write!(f, ",scope={scope}")?;
        }
        self.target.iter().try_for_each(|target| write!(f, ",target={target}"))
    }
}

impl FromStr for VirtualDevice {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        let mut builder = Self::builder();
        let (device, mut rest) = split(text);
        let (device_type, id) = device.split_once(':').map_or((device, None), |(kind, id)| (kind, Some(id)));
        if device_type != "*" {
            builder = builder.field("device_type", device_type)?;
        }
        if let Some(id) = id.filter(|id| *id != "*") {
            builder = builder.field("virtual_device_id", id)?;
        }
        while let Some(field) = rest {
            if let Some(target) = field.strip_prefix("target=") {
                builder = builder.field("target", target)?;
                break;
            }
            let (field, next) = split(field);
            builder = match field.strip_prefix("scope=") {
                Some(scope) => builder.field("memory_scope", scope)?,
                None => {
                    let text = format!("'{field}' in '{text}' is neither scope=… nor target=…");
                    return Err(RpcError::invalid_argument(text));
                }
            };
            rest = next;
        }
        builder.build()
    }
}

/// Splits a text at its first comma.
fn split(text: &str) -> (&str, Option<&str>) {
    text.split_once(',').map_or((text, None), |(first, rest)| (first, Some(rest)))
}

/// Builder of a [`VirtualDevice`]. Its setters replace earlier values; only [`field`](Self::field)
/// refuses a field that is set already.
#[derive(Clone, Debug, Default)]
pub struct VirtualDeviceBuilder(Fields);

impl VirtualDeviceBuilder {
    /// Names of the fields, as [`field`](Self::field) and serde take them.
    pub const FIELDS: [&str; 4] = ["device_type", "virtual_device_id", "target", "memory_scope"];

    /// Sets the type of device.
    #[must_use]
    pub fn device_type(mut self, device_type: DeviceType) -> Self {
        self.0.device_type = Some(device_type);
        self
    }

    /// Sets the number among the devices of its type, from 0.
    #[must_use]
    pub fn virtual_device_id(mut self, id: i32) -> Self {
        self.0.virtual_device_id = Some(id);
        self
    }

    /// Sets the target that code is compiled for.
    #[must_use]
    pub fn target(mut self, target: Target) -> Self {
        self.0.target = Some(target);
        self
    }

    /// Sets the memory scope of data on the device.
    #[must_use]
    pub fn memory_scope(mut self, scope: impl Into<String>) -> Self {
        self.0.memory_scope = Some(scope.into());
        self
    }

    /// Sets the field of that name from text.
    ///
    /// # Errors
    ///
    /// The field does not exist, it was set before, or the text is no value of it.
    pub fn field(mut self, name: &str, value: &str) -> Result<Self> {
        let Fields { device_type, virtual_device_id, target, memory_scope } = &mut self.0;
        match name {
            "device_type" => once(name, device_type, value.parse()?)?,
            "virtual_device_id" => {
                let number = value.parse();
                let no_number = |_| RpcError::invalid_argument(format!("'{value}' is not a device number"));
                once(name, virtual_device_id, number.map_err(no_number)?)?;
            }
            "target" => once(name, target, value.parse()?)?,
            "memory_scope" => once(name, memory_scope, value.to_owned())?,
            _ => {
                let known = Self::FIELDS.join(", ");
                return Err(RpcError::invalid_argument(format!(
                    "a virtual device has no field '{}'; there are {known}",
                    name.escape_debug()
                )));
            }
        }
        Ok(self)
    }

    /// Builds the virtual device.
    ///
    /// # Errors
    ///
    /// The target is for another type of device; the number is negative; or the memory scope is
    /// empty or contains white space, control characters or commas.
    pub fn build(self) -> Result<VirtualDevice> {
        self.0.try_into()
    }
}

fn once<T>(name: &str, field: &mut Option<T>, value: T) -> Result<()> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(RpcError::invalid_argument(format!("{name} is given twice"))),
    }
}

/// Serialized form, which is not checked yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename = "VirtualDevice")]
struct Fields {
    device_type: Option<DeviceType>,
    virtual_device_id: Option<i32>,
    target: Option<Target>,
    memory_scope: Option<String>,
}

impl TryFrom<Fields> for VirtualDevice {
    type Error = RpcError;

    fn try_from(fields: Fields) -> Result<Self> {
        let Fields { device_type, virtual_device_id, target, memory_scope } = fields;
        if let (Some(device_type), Some(target)) = (device_type, &target)
            && device_type != target.device_type()
        {
            let text =
                format!("target '{target}' is for {}, but the device type is {device_type}", target.device_type());
            return Err(RpcError::invalid_argument(text));
        }
        if let Some(id) = virtual_device_id.filter(|id| *id < 0) {
            return Err(RpcError::invalid_argument(format!("{id} is not a device number")));
        }
        let is_bad = |c: char| c.is_whitespace() || c.is_control() || c == ',';
        if let Some(scope) = memory_scope.as_deref().filter(|scope| scope.is_empty() || scope.contains(is_bad)) {
            return Err(RpcError::invalid_argument(format!("'{}' cannot be a memory scope", scope.escape_debug())));
        }
        let device_type = device_type.or_else(|| target.as_ref().map(Target::device_type));
        Ok(Self { device_type, virtual_device_id, target, memory_scope })
    }
}

impl From<VirtualDevice> for Fields {
    fn from(device: VirtualDevice) -> Self {
        let VirtualDevice { device_type, virtual_device_id, target, memory_scope } = device;
        Self { device_type, virtual_device_id, target, memory_scope }
    }
}

/// An existing device, with the properties that constraints ask for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceDescription {
    /// The device, as its session names it.
    pub device: Device,
    /// Target of the device's code.
    pub target: Target,
    /// Memory scopes besides [`GLOBAL`].
    #[serde(default)]
    pub memory_scopes: Vec<String>,
}

impl DeviceDescription {
    /// Creates a description from the device's answers to
    /// [`Target`](crate::DeviceAttribute::Target) and
    /// [`MemoryScopes`](crate::DeviceAttribute::MemoryScopes).
    ///
    /// # Errors
    ///
    /// A target that cannot be parsed.
    pub fn from_attributes(device: Device, target: Value, memory_scopes: Value) -> Result<Self> {
        let target = match target {
            Value::Str(text) => text.parse()?,
            _ => Target::of_device(device.kind),
        };
        let scopes = if let Value::List(scopes) = memory_scopes { scopes } else { Vec::new() };
        let text = |scope| if let Value::Str(scope) = scope { Some(scope) } else { None };
        Ok(Self { device, target, memory_scopes: scopes.into_iter().filter_map(text).collect() })
    }

    /// Returns true if the device has the type, number and memory scope of `wanted`, and runs code
    /// of its target. The device's target may [have more attributes](Target::provides).
    pub fn satisfies(&self, wanted: &VirtualDevice) -> bool {
        wanted.is_satisfied_by(self.device, Some(&self.target), &self.memory_scopes)
    }
}

impl fmt::Display for DeviceDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} '{}' with memory {GLOBAL}", self.device, self.target)?;
        self.memory_scopes.iter().try_for_each(|scope| write!(f, " or {scope}"))
    }
}

#[cfg(test)]
mod tests;
