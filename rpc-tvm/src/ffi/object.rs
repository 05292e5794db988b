//! Counted references to the library's objects, and values that own one.

use std::ffi::c_void;
use std::mem;
use std::ptr::NonNull;

use super::abi::{Any, ByteArray, DlTensor, ErrorCell, ObjectHeader, ShapeCell, slice_of, type_index};
use super::bindings::Bindings;
use super::taking_lock::TakingGuard;
use rpc_core::error::{Result, RpcError};

/// A reference to an object, with a count of its own.
pub(super) struct Ref {
    bindings: &'static Bindings,
    object: NonNull<ObjectHeader>,
}

// SAFETY: objects are counted atomically, and may be used and freed on any thread; TVM-FFI requires
// that of their creators.
unsafe impl Send for Ref {}
// SAFETY: as above.
unsafe impl Sync for Ref {}

impl Ref {
    /// # Safety
    ///
    /// `object` is alive, and the caller gives away a count of it.
    pub(super) const unsafe fn from_owned(bindings: &'static Bindings, object: NonNull<ObjectHeader>) -> Self {
        Self { bindings, object }
    }

    /// # Safety
    ///
    /// `object` is alive.
    pub(super) unsafe fn from_borrowed(bindings: &'static Bindings, object: NonNull<ObjectHeader>) -> Self {
        // SAFETY: the caller's promise.
        unsafe { (bindings.functions.object_inc_ref)(object.as_ptr()) };
        Self { bindings, object }
    }

    pub(super) const fn raw(&self) -> *mut ObjectHeader {
        self.object.as_ptr()
    }

    pub(super) fn type_index(&self) -> i32 {
        // SAFETY: the object is alive, and its type never changes.
        unsafe { self.object.as_ref() }.type_index
    }

    /// Returns the name of the object's type.
    pub(super) fn type_key(&self) -> String {
        let index = self.type_index();
        // SAFETY: the type exists, since there is an object of it (for any other index the library
        // would end the process); types are never removed, and their names live as long as they.
        let key = unsafe { (self.bindings.functions.type_info)(index).as_ref().map(|info| info.type_key.text()) };
        key.unwrap_or_else(|| format!("type {index}"))
    }

    /// Returns the value that borrows this object.
    pub(super) fn as_any(&self) -> Any {
        Any::pointer(self.type_index(), self.object.as_ptr().cast())
    }

    /// Returns the value that owns this object.
    pub(super) fn into_any(self) -> OwnedAny {
        let (bindings, value) = (self.bindings, self.as_any());
        mem::forget(self);
        OwnedAny { bindings, value }
    }

    /// Returns the text of a string object, or the bytes of a bytes object.
    pub(super) fn byte_array(&self) -> Option<&[u8]> {
        if !matches!(self.type_index(), type_index::STR | type_index::BYTES) {
            return None;
        }
        // SAFETY: objects of these types have such contents, which never change.
        let array = unsafe { &*self.contents::<ByteArray>() };
        // SAFETY: as above.
        Some(unsafe { slice_of(array.data, array.size) })
    }

    pub(super) fn dimensions(&self) -> Option<&[i64]> {
        if self.type_index() != type_index::SHAPE {
            return None;
        }
        // SAFETY: objects of this type have such contents, which never change.
        let cell = unsafe { &*self.contents::<ShapeCell>() };
        // SAFETY: as above.
        Some(unsafe { slice_of(cell.data, cell.size) })
    }

    pub(super) fn tensor(&self) -> Option<&DlTensor> {
        // SAFETY: objects of this type have such contents, which never change.
        (self.type_index() == type_index::TENSOR).then(|| unsafe { &*self.contents::<DlTensor>() })
    }

    /// Returns the contents of an error object; `self` must be one.
    pub(super) fn error(&self) -> &ErrorCell {
        // SAFETY: error objects have such contents; the backtrace changes only while the error
        // passes through this thread.
        unsafe { &*self.contents::<ErrorCell>() }
    }

    fn contents<T>(&self) -> *const T {
        // SAFETY: contents follow the header in the same object.
        unsafe { self.object.as_ptr().add(1) }.cast::<T>().cast_const()
    }
}

impl Clone for Ref {
    fn clone(&self) -> Self {
        // SAFETY: the object is alive.
        unsafe { Self::from_borrowed(self.bindings, self.object) }
    }
}

impl Drop for Ref {
    fn drop(&mut self) {
        debug_assert!(!TakingGuard::is_held(), "a deleter of foreign code would run under our lock");
        // SAFETY: the count belonged to this reference.
        unsafe { (self.bindings.functions.object_dec_ref)(self.object.as_ptr()) };
    }
}

/// A value, with a count of its object if there is one.
pub(super) struct OwnedAny {
    bindings: &'static Bindings,
    value: Any,
}

impl OwnedAny {
    /// # Safety
    ///
    /// The caller gives away a count of the object in `value`, which is alive, if there is one.
    pub(super) const unsafe fn new(bindings: &'static Bindings, value: Any) -> Self {
        Self { bindings, value }
    }

    /// Wraps a value that is no object.
    pub(super) const fn plain(bindings: &'static Bindings, value: Any) -> Self {
        debug_assert!(!value.is_object());
        Self { bindings, value }
    }

    /// Returns the value that borrows the object.
    pub(super) const fn view(&self) -> Any {
        self.value
    }

    /// Gives the value away, with the count of its object.
    pub(super) const fn into_raw(self) -> Any {
        let value = self.value;
        mem::forget(self);
        value
    }

    pub(super) const fn is_none(&self) -> bool {
        self.value.type_index == type_index::NONE
    }

    pub(super) fn to_int(&self) -> Result<i64> {
        match self.value.type_index {
            // SAFETY: the type index says that this is stored.
            type_index::INT | type_index::BOOL => Ok(unsafe { self.value.payload.int }),
            _ => Err(self.unexpected("an int")),
        }
    }

    pub(super) fn to_text(&self) -> Result<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if let Some(small) = small_bytes(&self.value) {
            return Ok(text(small));
        }
        // SAFETY: the value is complete and alive.
        let object = unsafe { object_in(self.bindings, &self.value) };
        object.as_ref().and_then(Ref::byte_array).map(text).ok_or_else(|| self.unexpected("a string"))
    }

    pub(super) fn to_object(&self) -> Result<Ref> {
        self.to_optional_object()?.ok_or_else(|| self.unexpected("an object"))
    }

    /// Returns the object, or `None` for null.
    pub(super) fn to_optional_object(&self) -> Result<Option<Ref>> {
        if self.is_none() {
            return Ok(None);
        }
        // SAFETY: the value is complete and alive.
        unsafe { object_in(self.bindings, &self.value) }.map(Some).ok_or_else(|| self.unexpected("an object"))
    }

    fn unexpected(&self, expected: &str) -> RpcError {
        // SAFETY: the value is complete and alive.
        let got = match unsafe { object_in(self.bindings, &self.value) } {
            Some(object) => object.type_key(),
            None => format!("a value of type {}", self.value.type_index),
        };
        RpcError::internal(format!("expected {expected} from TVM-FFI, got {got}"))
    }
}

impl Drop for OwnedAny {
    fn drop(&mut self) {
        // SAFETY: the value is complete, and this owned the count.
        unsafe {
            if self.value.is_object()
                && let Some(object) = NonNull::new(self.value.payload.pointer)
            {
                (self.bindings.functions.object_dec_ref)(object.as_ptr().cast());
            }
        }
    }
}

/// Returns a new reference to the object in `value`, if there is one.
///
/// # Safety
///
/// `value` is complete, and its object is alive.
pub(super) unsafe fn object_in(bindings: &'static Bindings, value: &Any) -> Option<Ref> {
    // SAFETY: the caller's promise.
    unsafe {
        let object = value.is_object().then(|| NonNull::new(value.payload.pointer)).flatten()?;
        Some(Ref::from_borrowed(bindings, object.cast()))
    }
}

/// Returns the bytes of a small string, or of small bytes.
pub(super) fn small_bytes(value: &Any) -> Option<&[u8]> {
    if !matches!(value.type_index, type_index::SMALL_STR | type_index::SMALL_BYTES) {
        return None;
    }
    // SAFETY: any eight bytes are valid bytes, and every value has them.
    let bytes = unsafe { &value.payload.bytes };
    Some(&bytes[..(value.small_len as usize).min(bytes.len())])
}

/// A module's value without a counterpart in sessions, held for the owner of its handle.
pub(super) enum OpaqueValue {
    Object(Ref),
    /// An address, which never leaves the process.
    Pointer(Pointer),
}

/// An address that only foreign code dereferences.
pub(super) struct Pointer(pub(super) *mut c_void);

// SAFETY: the address is only passed on here.
unsafe impl Send for Pointer {}
// SAFETY: as above.
unsafe impl Sync for Pointer {}

impl OpaqueValue {
    pub(super) fn view(&self) -> Any {
        match self {
            Self::Object(object) => object.as_any(),
            Self::Pointer(pointer) => Any::pointer(type_index::OPAQUE_POINTER, pointer.0),
        }
    }

    /// Returns the value that owns it.
    pub(super) fn to_owned_any(&self, bindings: &'static Bindings) -> OwnedAny {
        match self {
            Self::Object(object) => object.clone().into_any(),
            Self::Pointer(_) => OwnedAny::plain(bindings, self.view()),
        }
    }
}

const _: () = assert!(size_of::<Any>() == 16 && size_of::<ObjectHeader>() == 24 && size_of::<DlTensor>() == 48);

/// Returns kind, message and backtrace of an error.
pub(super) fn error_texts(error: &Ref) -> [String; 3] {
    let ErrorCell { kind, message, backtrace } = error.error();
    [kind, message, backtrace].map(ByteArray::text)
}
