//! Tests of attributes, of the set of devices, and of copies between devices.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Mutex;

use super::copy::BOUNCE_BYTES;
use super::*;
use crate::dlpack::{Device, DeviceType};
use crate::error::{ErrorKind, Result};
use crate::value::Value;

/// Memory that the processor cannot access, like that of a GPU.
pub(crate) struct Remote(Mutex<Vec<u8>>);

impl Remote {
    pub(crate) fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(Mutex::new(bytes.into()))
    }
}

// SAFETY: there is no host pointer, and the length never changes.
unsafe impl Memory for Remote {
    fn len(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.0.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..out.len()]);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn contents(memory: &dyn Memory) -> Vec<u8> {
    let mut out = vec![0; memory.len() as usize];
    // SAFETY: the whole memory, which nothing else uses.
    unsafe { memory.copy_to_host(0, &mut out).unwrap() };
    out
}

#[test]
fn attributes_keep_their_numbers_and_names() {
    for attribute in DeviceAttribute::ALL {
        assert_eq!(DeviceAttribute::from_code(attribute.code()), Some(*attribute));
        assert_eq!(attribute.name().parse::<DeviceAttribute>().unwrap(), *attribute);
    }
    assert_eq!(DeviceAttribute::ComputeUnits.code(), 7);
    assert_eq!(DeviceAttribute::AvailableMemory.code(), 15);
    assert_eq!(DeviceAttribute::from_code(999), None);
    assert!("wings".parse::<DeviceAttribute>().unwrap_err().message().contains("warp_size"));
}

#[test]
fn the_error_for_an_absent_kind_gives_the_reason() {
    let devices = Devices::new().absent(DeviceType::CUDA, "libcuda.so.1 was not found");
    assert!(devices.get(Device::cpu()).is_ok());
    let error = devices.get(Device::cuda(0)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
    assert!(error.message().contains("libcuda.so.1 was not found"));
    let error = devices.get(Device::new(DeviceType::METAL, 0)).err().unwrap();
    assert_eq!(error.message(), "no metal: this session does not offer it");
    for index in [1, -1] {
        let error = devices.get(Device::new(DeviceType::CPU, index)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
    }
    let kinds: Vec<_> = devices.iter().map(|(kind, api)| (kind, api.err())).collect();
    assert_eq!(kinds, [(DeviceType::CPU, None), (DeviceType::CUDA, Some("libcuda.so.1 was not found"))]);
}

#[test]
fn existence_is_answered_for_every_device() {
    let devices = Devices::new().absent(DeviceType::CUDA, "no driver");
    let exists = |device| devices.attribute(device, DeviceAttribute::Exists).unwrap();
    assert_eq!(exists(Device::cpu()), Value::Bool(true));
    assert_eq!(exists(Device::new(DeviceType::CPU, 7)), Value::Bool(false));
    assert_eq!(exists(Device::cuda(0)), Value::Bool(false));
    assert!(devices.attribute(Device::cuda(0), DeviceAttribute::Name).is_err());
}

#[test]
fn copies_pass_between_host_and_device_in_all_directions() {
    let cpu = CpuDevice::default();
    let host = cpu.allocate(0, &AllocRequest::new(8)).unwrap();
    let other = cpu.allocate(0, &AllocRequest::new(8)).unwrap();
    let device = Remote::new([1, 2, 3, 4, 5, 6, 7, 8]);
    let second = Remote::new([0; 8]);
    // SAFETY: all ranges lie within 8 bytes, and nothing else uses the memories.
    unsafe {
        cpu.copy(&device, 2, &*host, 1, 4).unwrap();
        cpu.copy(&*host, 0, &*other, 2, 6).unwrap();
        cpu.copy(&*other, 0, &device, 0, 8).unwrap();
        cpu.copy(&device, 3, &second, 0, 5).unwrap();
    }
    assert_eq!(contents(&*host), [0, 3, 4, 5, 6, 0, 0, 0]);
    assert_eq!(contents(&device), [0, 0, 0, 3, 4, 5, 6, 0]);
    assert_eq!(contents(&second), [3, 4, 5, 6, 0, 0, 0, 0]);
}

#[test]
fn overlapping_copies_keep_what_the_source_held() {
    let len = 3 * BOUNCE_BYTES as usize + 5;
    let pattern: Vec<u8> = (0..len).map(|byte| (byte % 251) as u8).collect();
    let shift = 1000;
    for (from, to) in [(0, shift), (shift, 0)] {
        let memory = Remote::new(pattern.clone());
        // SAFETY: both ranges end within the memory, which nothing else uses.
        unsafe { copy_by_host(&memory, from as u64, &memory, to as u64, (len - shift) as u64).unwrap() };
        assert_eq!(contents(&memory)[to..][..len - shift], pattern[from..][..len - shift]);
    }
}

#[test]
fn the_preferred_device_is_chosen_if_it_satisfies_the_constraint_and_else_the_first() {
    let devices = Devices::new().absent(DeviceType::CUDA, "no driver");
    assert_eq!(devices.describe().map(|device| device.device).collect::<Vec<_>>(), [Device::cpu()]);
    let choose = |wanted: &str, preferred| devices.choose(&wanted.parse().unwrap(), preferred);
    // Without a constraint the preferred device is not examined.
    assert_eq!(choose("*", Device::cuda(3)).unwrap(), Device::cuda(3));
    assert_eq!(choose("cpu,target=llvm", Device::cuda(3)).unwrap(), Device::cpu());
    let error = choose("cuda", Device::cpu()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
    assert!(error.message().starts_with("no device is cuda; there are cpu:0 'llvm -mtriple="), "{error}");
}
