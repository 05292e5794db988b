//! The window of a session between two processes of one machine: a memory file with slots for the
//! payloads of both directions.
//!
//! | offset | bytes | content |
//! | --- | --- | --- |
//! | 0 | 16 | the client's nonce, which its offer repeats |
//! | 16 | 16 | the server's nonce, which its answer repeats |
//! | 1024 + 64 × n | 4 | word of slot n: 0 while it is free, 1 in use, 2 in use and waited for |
//! | 4096 + 1 MiB × n | 1 MiB | slot n: 0 to 3 from client to server, 4 to 7 the other way |
//!
//! An offer is the number of the file's descriptor in the client's process (u32) and the nonce; an
//! answer is the server's nonce. The server takes the process from the kernel, never from the
//! offer.
//!
//! Either process may write anything at any time. A side trusts nothing that it reads here: words
//! only tell it which of its own slots to use, and payloads are copied before they are looked at.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::proto::{OfferedWindow, Window, WindowOpener};
use rpc_core::{ErrorKind, RpcError};

use crate::memory_file::MemoryFile;

/// Slots of each direction: enough for both sides to copy at once, and few enough to stay in
/// caches.
const SLOTS: u16 = 4;

/// Bytes of a slot: one chunk of a copy.
const SLOT_LEN: usize = 1 << 20;

const NONCE_LEN: usize = 16;
const SERVER_NONCE: usize = 16;
const WORDS: usize = 1024;
const WORD_STEP: usize = 64;
const HEAD: usize = 4096;
const WINDOW_LEN: usize = HEAD + 2 * SLOTS as usize * SLOT_LEN;

const FREE: u32 = 0;
const USED: u32 = 1;
/// The slot is in use, and its side waits until one is free.
const AWAITED: u32 = 2;

/// Makes a window for a client. Returns `None` if the system has no memory for it.
pub(crate) fn offer() -> Option<OfferedWindow> {
    let made = random().and_then(|nonce| Ok((nonce, MemoryFile::create("rpc-window", WINDOW_LEN)?)));
    let (nonce, (memory, file)) = match made {
        Ok(made) => made,
        Err(error) => {
            tracing::debug!(%error, "no memory to share with the server");
            return None;
        }
    };
    let window = SharedWindow { memory, is_client: true };
    window.write(0, &nonce);
    let descriptor = u32::try_from(file.as_raw_fd()).ok()?;
    let offer = [&descriptor.to_le_bytes()[..], &nonce].concat();
    let confirm = move |proof: &[u8]| {
        // The file stays open until the server has answered.
        drop(file);
        let is_open = proof == window.read_nonce(SERVER_NONCE);
        is_open.then(|| Box::new(window) as Box<dyn Window>)
    };
    Some(OfferedWindow { offer, confirm: Box::new(confirm) })
}

/// Returns the way to open a window that the process `client` offers.
pub(crate) fn opener(client: u32) -> WindowOpener {
    let open = move |offer: &[u8]| {
        let refused = |text: String| RpcError::new(ErrorKind::Refused, text);
        let (window, proof) = open(client, offer).map_err(|error| refused(format!("the offered memory: {error}")))?;
        Ok((Box::new(window) as Box<dyn Window>, proof.to_vec()))
    };
    WindowOpener { window_bytes: WINDOW_LEN as u64, open: Box::new(open) }
}

fn open(client: u32, offer: &[u8]) -> io::Result<(SharedWindow, [u8; NONCE_LEN])> {
    let (descriptor, nonce) = offer.split_first_chunk().ok_or_else(|| io::Error::other("it is malformed"))?;
    let memory = MemoryFile::open(client, u32::from_le_bytes(*descriptor), WINDOW_LEN)?;
    let window = SharedWindow { memory, is_client: false };
    if nonce != window.read_nonce(0) {
        return Err(io::Error::other("it is not that of the offer"));
    }
    let proof = random()?;
    window.write(SERVER_NONCE, &proof);
    Ok((window, proof))
}

fn random() -> io::Result<[u8; NONCE_LEN]> {
    let mut nonce = [0; NONCE_LEN];
    SystemRandom::new().fill(&mut nonce).map_err(|_| io::Error::other("the system gives no random numbers"))?;
    Ok(nonce)
}

/// One side's window.
struct SharedWindow {
    memory: MemoryFile,
    is_client: bool,
}

impl SharedWindow {
    /// Returns the index of a slot of the client, or of the server.
    fn index(slot: u16, of_client: bool) -> usize {
        usize::from(if of_client { slot } else { slot + SLOTS })
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        let word = self.at(WORDS + index * WORD_STEP, size_of::<AtomicU32>());
        // SAFETY: in the mapping, which lives as long as `self`; aligned, because the mapping
        // begins on a page and the offset is a multiple of 64; and this process accesses it in no
        // other way.
        unsafe { AtomicU32::from_ptr(word.cast()) }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: in the mapping. The words say who may write where and when; a peer that does not
        // keep to them gets garbage.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: in the mapping, and `into` is ours alone. Bytes that the peer changes meanwhile
        // come out as garbage, and any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    fn read_nonce(&self, offset: usize) -> [u8; NONCE_LEN] {
        let mut nonce = [0; NONCE_LEN];
        self.read(offset, &mut nonce);
        nonce
    }

    /// Returns the address of `len` bytes.
    ///
    /// # Panics
    ///
    /// They do not lie in the window.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.memory.len(), "{len} bytes at {offset} are not in the window");
        // SAFETY: within the mapping.
        unsafe { self.memory.start().add(offset) }
    }
}

impl Window for SharedWindow {
    fn put(&mut self, pieces: &VecDeque<Bytes>, len: usize) -> Option<u16> {
        if len > SLOT_LEN || pieces.iter().map(Bytes::len).sum::<usize>() != len {
            return None;
        }
        // The lowest one, so that few slots are used and stay in the caches.
        let slot = (0..SLOTS).find(|slot| {
            // Acquire: the peer's reads of the last payload come before this side's next writes.
            self.word(Self::index(*slot, self.is_client)).load(Ordering::Acquire) == FREE
        })?;
        let index = Self::index(slot, self.is_client);
        let mut offset = HEAD + index * SLOT_LEN;
        for piece in pieces {
            self.write(offset, piece);
            offset += piece.len();
        }
        self.word(index).store(USED, Ordering::Release);
        Some(slot)
    }

    fn has_room(&mut self) -> bool {
        let this = &*self;
        let words = || (0..SLOTS).map(move |slot| this.word(Self::index(slot, this.is_client)));
        // All are tried, so that the first one that the peer frees tells it.
        words().any(|word| word.load(Ordering::Acquire) == FREE)
            || words().fold(false, |is_free, word| {
                let marked = word.compare_exchange(USED, AWAITED, Ordering::AcqRel, Ordering::Acquire);
                is_free | (marked == Err(FREE))
            })
    }

    fn take(&mut self, slot: u16, into: &mut [u8]) -> Option<bool> {
        if slot >= SLOTS || into.len() > SLOT_LEN {
            return None;
        }
        let index = Self::index(slot, !self.is_client);
        // Acquire, with the peer's store behind its writes.
        let _ = self.word(index).load(Ordering::Acquire);
        self.read(HEAD + index * SLOT_LEN, into);
        Some(self.word(index).swap(FREE, Ordering::AcqRel) == AWAITED)
    }
}

impl fmt::Debug for SharedWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedWindow").field("is_client", &self.is_client).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    /// Returns both sides of a window.
    fn window() -> [Box<dyn Window>; 2] {
        let OfferedWindow { offer, confirm } = offer().unwrap();
        let WindowOpener { window_bytes, open } = opener(std::process::id());
        assert_eq!(window_bytes, WINDOW_LEN as u64);
        let (theirs, proof) = open(&offer).unwrap();
        [confirm(&proof).unwrap(), theirs]
    }

    fn put(window: &mut dyn Window, pieces: &[&'static [u8]]) -> Option<u16> {
        let len = pieces.iter().map(|piece| piece.len()).sum();
        window.put(&pieces.iter().map(|piece| Bytes::from_static(piece)).collect(), len)
    }

    #[test]
    fn payloads_pass_both_ways_in_slots_of_their_own() {
        let [mut ours, mut theirs] = window();
        for round in 0..3 {
            for slot in 0..SLOTS {
                assert_eq!(put(&mut *ours, &[b"to ", b"server"]), Some(slot), "{round}");
                assert_eq!(put(&mut *theirs, &[b"to client"]), Some(slot), "{round}");
            }
            assert_eq!((put(&mut *ours, &[b"one more"]), put(&mut *theirs, &[b"one more"])), (None, None));
            for slot in (0..SLOTS).rev() {
                let mut read = [0; 9];
                assert_eq!(theirs.take(slot, &mut read), Some(false));
                assert_eq!(&read, b"to server");
                assert_eq!(ours.take(slot, &mut read), Some(false));
                assert_eq!(&read, b"to client");
            }
        }
    }

    #[test]
    fn the_side_that_frees_a_slot_learns_if_the_other_waits() {
        let [mut ours, mut theirs] = window();
        for slot in 0..SLOTS {
            assert!(ours.has_room());
            assert_eq!(put(&mut *ours, &[b"payload"]), Some(slot));
        }
        assert!(!ours.has_room() && theirs.has_room());
        assert_eq!(theirs.take(2, &mut []), Some(true));
        assert!(ours.has_room());
        assert_eq!(put(&mut *ours, &[b"next"]), Some(2));
        // It was put after the last wait; those before it were in use then.
        assert_eq!(theirs.take(2, &mut []), Some(false));
        assert_eq!(theirs.take(0, &mut []), Some(true));
    }

    #[test]
    fn a_slot_that_is_taken_without_its_bytes_is_free() {
        let [mut ours, mut theirs] = window();
        assert_eq!(put(&mut *ours, &[b"dropped"]), Some(0));
        assert_eq!(theirs.take(0, &mut []), Some(false));
        assert_eq!(put(&mut *ours, &[b"next"]), Some(0));
    }

    #[test]
    fn slots_out_of_range_and_payloads_that_do_not_fit_are_refused() {
        let [mut ours, mut theirs] = window();
        assert_eq!((theirs.take(SLOTS, &mut [0]), theirs.take(u16::MAX, &mut [0])), (None, None));
        assert_eq!(ours.take(0, &mut vec![0; SLOT_LEN + 1]), None);
        let large: VecDeque<Bytes> = [Bytes::from(vec![0; SLOT_LEN + 1])].into();
        assert_eq!(ours.put(&large, SLOT_LEN + 1), None);
        let whole: VecDeque<Bytes> = [Bytes::from(vec![7; SLOT_LEN])].into();
        // The last slot ends with the window.
        for slot in 0..SLOTS {
            assert_eq!(theirs.put(&whole, SLOT_LEN), Some(slot));
        }
        let mut read = vec![0; SLOT_LEN];
        assert_eq!(ours.take(SLOTS - 1, &mut read), Some(false));
        assert!(read.iter().all(|byte| *byte == 7));
    }

    fn memory_file(len: usize, seals: SealFlags) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, len as u64).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    /// Returns the reason for which a descriptor of this process is not opened as a window whose
    /// nonce is all zero, as fresh memory has it.
    fn refusal(file: impl AsFd) -> String {
        let descriptor = file.as_fd().as_raw_fd() as u32;
        let offer = [&descriptor.to_le_bytes()[..], &[0; NONCE_LEN]].concat();
        open(std::process::id(), &offer).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn only_a_sealed_memory_file_of_the_right_length_is_opened() {
        let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        assert_eq!(refusal(memory_file(WINDOW_LEN, sealed)), "");
        assert!(refusal(memory_file(WINDOW_LEN, SealFlags::empty())).contains("shrink"));
        assert!(refusal(memory_file(WINDOW_LEN, SealFlags::GROW)).contains("shrink"));
        assert!(refusal(memory_file(WINDOW_LEN - 1, sealed)).contains("bytes"));
        assert!(refusal(memory_file(WINDOW_LEN + 4096, sealed)).contains("bytes"));
        assert!(refusal(memory_file(0, sealed)).contains("bytes"));
        let (read, _write) = rustix::pipe::pipe().unwrap();
        assert!(refusal(read).contains("no memory file"));
        assert!(refusal(std::fs::File::open("/dev/zero").unwrap()).contains("no memory file"));
        assert!(refusal(tempfile::tempfile().unwrap()).contains("no memory file"));
    }

    #[test]
    fn an_offer_of_another_process_or_memory_and_a_wrong_proof_are_refused() {
        let OfferedWindow { offer, confirm } = offer().unwrap();
        let own = std::process::id();
        // No process has this number.
        assert!(open(u32::MAX, &offer).is_err());
        for malformed in [&[][..], &offer[..3], &offer[..4], &offer[..19], &[&offer[..], &[0]].concat()] {
            assert!(open(own, malformed).is_err(), "{malformed:?}");
        }
        let mut other = offer.clone();
        other[19] ^= 1;
        assert!(open(own, &other).err().unwrap().to_string().contains("not that of the offer"));
        let no_descriptor = [&u32::MAX.to_le_bytes()[..], &offer[4..]].concat();
        assert!(open(own, &no_descriptor).is_err());
        let (_, mut proof) = open(own, &offer).unwrap();
        proof[0] ^= 1;
        assert!(confirm(&proof).is_none());
    }
}
