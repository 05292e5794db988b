//! Tests of layouts, views, and the rules of borrowing (B-1 to B-4, defined in `storage.rs`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, Weak};

use proptest::prelude::*;

use super::*;
use crate::device::tests::Remote;
use crate::dlpack::DataTypeCode;

fn storage(size: u64) -> Arc<Storage> {
    let memory = CpuDevice::default().allocate(0, &AllocRequest::new(size)).unwrap();
    Storage::new(Device::cpu(), memory, None)
}

fn remote(bytes: &[u8]) -> Arc<Storage> {
    Storage::new(Device::cuda(0), Box::new(Remote::new(bytes)), None)
}

/// Returns a `Resume` that sends the borrow to the receiver.
fn sends() -> (Resume, Receiver<Borrow>) {
    let (sender, receiver) = mpsc::channel();
    (Box::new(move |borrow| _ = sender.send(borrow)), receiver)
}

fn wait(storage: &Arc<Storage>, access: Access) -> (PendingBorrow, Receiver<Borrow>) {
    let (resume, receiver) = sends();
    (storage.borrow_or_wait(access, resume).expect_err("the storage is borrowed"), receiver)
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("an error").kind()
}

mod layout {
    use super::*;

    #[track_caller]
    fn refused(offset: u64, shape: &[i64], strides: Option<&[i64]>, dtype: DataType) {
        let tensor = Tensor::new(storage(24), offset, shape, strides.map(Into::into), dtype);
        assert_eq!(kind(tensor), ErrorKind::InvalidArgument);
    }

    #[test]
    fn layouts_beyond_the_storage_are_refused() {
        assert!(Tensor::new(storage(24), 0, [2, 3], None, DataType::F32).is_ok());
        refused(1, &[2, 3], None, DataType::F32);
        refused(0, &[7], None, DataType::F32);
        refused(u64::MAX, &[1], None, DataType::F32);
        refused(u64::MAX - 3, &[1], None, DataType::F32);
        refused(25, &[0], None, DataType::F32);
        assert!(Tensor::new(storage(24), 24, [0], None, DataType::F32).is_ok());
    }

    #[test]
    fn overflowing_and_negative_layouts_are_refused() {
        refused(0, &[i64::MAX, i64::MAX], None, DataType::F32);
        refused(0, &[i64::MAX], None, DataType::F64);
        refused(0, &[-1], None, DataType::F32);
        refused(0, &[i64::MIN, 0], None, DataType::F32);
        refused(0, &[2], Some(&[-1]), DataType::F32);
        refused(0, &[2, 2], Some(&[i64::MAX, i64::MAX]), DataType::F32);
        refused(0, &[2, 2], Some(&[1]), DataType::F32);
        refused(0, &[2], None, DataType::new(DataTypeCode::FLOAT, 0));
        refused(0, &[1; 33], None, DataType::F32);
        assert!(Tensor::new(storage(24), 0, [1; 32], None, DataType::F32).is_ok());
    }

    /// Regression: multiplying up to the zero overflowed.
    #[test]
    fn a_huge_shape_with_a_zero_has_no_elements() {
        let tensor = Tensor::new(storage(0), 0, [i64::MAX, i64::MAX, 0], None, DataType::F32).unwrap();
        assert_eq!(tensor.element_count(), 0);
        assert_eq!(tensor.size_bytes(), 0);
    }

    #[test]
    fn strided_layouts_are_checked_by_their_extent() {
        let column = Tensor::new(storage(24), 4, [2], Some(vec![3]), DataType::F32).unwrap();
        assert!(!column.is_dense());
        assert_eq!(column.size_bytes(), 8);
        refused(12, &[2], Some(&[3]), DataType::F32);
        refused(0, &[2], Some(&[6]), DataType::F32);
        assert!(Tensor::new(storage(24), 0, [1000], Some(vec![0]), DataType::F32).is_ok());
    }

    #[test]
    fn strides_of_a_dense_layout_are_dense() {
        for (shape, strides) in
            [(vec![2, 3], vec![3, 1]), (vec![2, 1, 3], vec![3, 77, 1]), (vec![1], vec![-5]), (vec![], vec![])]
        {
            assert!(Tensor::new(storage(24), 0, shape, Some(strides), DataType::F32).unwrap().is_dense());
        }
        let half_bytes = DataType::new(DataTypeCode::FLOAT4_E2M1FN, 4);
        let packed = Tensor::new(storage(2), 0, [3], Some(vec![1]), half_bytes).unwrap();
        assert_eq!(packed.size_bytes(), 2);
        refused(0, &[3], Some(&[2]), half_bytes);
    }

    #[test]
    fn a_view_stays_within_its_tensor_and_shares_its_storage() {
        let whole = Tensor::from_slice([4], &[1_f32, 2.0, 3.0, 4.0]).unwrap();
        let middle = whole.view(4, [2], None, DataType::F32).unwrap();
        assert_eq!(middle.read().unwrap().as_slice::<f32>().unwrap(), [2.0, 3.0]);
        let last = middle.view(4, [1], None, DataType::F32).unwrap();
        assert_eq!(last.read().unwrap().as_slice::<f32>().unwrap(), [3.0]);
        assert_eq!(kind(middle.view(4, [2], None, DataType::F32)), ErrorKind::InvalidArgument);
        assert_eq!(kind(middle.view(9, [0], None, DataType::F32)), ErrorKind::InvalidArgument);
        assert_eq!(kind(middle.view(u64::MAX, [1], None, DataType::U8)), ErrorKind::InvalidArgument);
        last.write().unwrap().as_mut_slice::<f32>().unwrap()[0] = 9.0;
        assert_eq!(whole.read().unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0, 9.0, 4.0]);
    }

    #[test]
    fn byte_ranges_count_from_the_first_element() {
        let tensor = Tensor::new(storage(24), 8, [2], None, DataType::F32).unwrap();
        assert_eq!(tensor.byte_range(2, 6).unwrap(), 10..16);
        assert_eq!(tensor.byte_range(8, 0).unwrap(), 16..16);
        for (offset, len) in [(0, 9), (9, 0), (1, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(kind(tensor.byte_range(offset, len)), ErrorKind::InvalidArgument);
        }
        let column = Tensor::new(storage(24), 0, [2], Some(vec![3]), DataType::F32).unwrap();
        assert_eq!(kind(column.byte_range(0, 1)), ErrorKind::InvalidArgument);
    }

    proptest! {
        /// For any layout that a peer claims, an accepted dense tensor can be read to its last
        /// byte, and nothing panics.
        #[test]
        fn accepted_layouts_lie_within_the_storage(
            offset in prop_oneof![0..40_u64, any::<u64>()],
            shape in prop::collection::vec(prop_oneof![-1..6_i64, any::<i64>()], 0..4),
            strides in prop::option::of(prop::collection::vec(prop_oneof![-1..6_i64, any::<i64>()], 0..4)),
            code in 0..20_u8, bits in any::<u8>(), lanes in prop_oneof![0..4_u16, any::<u16>()],
        ) {
            let dtype = DataType { code: DataTypeCode(code), bits, lanes };
            if let Ok(tensor) = Tensor::new(storage(32), offset, shape, strides, dtype) {
                let view = tensor.read().unwrap();
                if tensor.is_dense() {
                    prop_assert_eq!(view.bytes().unwrap().len() as u64, tensor.size_bytes());
                    let range = tensor.byte_range(0, tensor.size_bytes()).unwrap();
                    prop_assert!(range.end <= 32);
                }
                _ = tensor.element_count();
                _ = view.as_slice::<f32>();
            }
        }
    }
}

mod views {
    use super::*;

    #[test]
    fn the_error_of_a_slice_names_both_types() {
        let tensor = Tensor::from_slice([2, 2], &[1_i32, 2, 3, 4]).unwrap();
        let view = tensor.read().unwrap();
        assert_eq!(view.as_slice::<i32>().unwrap(), [1, 2, 3, 4]);
        let error = view.as_slice::<f32>().unwrap_err();
        assert_eq!(error.message(), "expected a tensor of float32, got int32");
        drop(view);
        let column = Tensor::new(tensor.storage().clone(), 0, [2], Some(vec![2]), DataType::I32).unwrap();
        let error = column.read().unwrap().as_slice::<i32>().err().unwrap();
        assert!(error.message().contains("strides [2]"));
        let far = Tensor::new(remote(&[0; 8]), 0, [2], None, DataType::F32).unwrap();
        let error = far.read().unwrap().as_slice::<f32>().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("cuda:0"));
        assert_eq!(kind(far.write().unwrap().bytes_mut().map(|_| ())), ErrorKind::Unsupported);
    }

    #[test]
    fn elements_at_a_misaligned_offset_are_an_error() {
        let tensor = Tensor::new(storage(24), 2, [2], None, DataType::F32).unwrap();
        let error = tensor.read().unwrap().as_slice::<f32>().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("offset 2"));
        assert!(tensor.write().unwrap().as_mut_slice::<f32>().is_err());
        assert_eq!(tensor.read().unwrap().bytes().unwrap(), [0; 8]);
        let nothing = Tensor::new(storage(24), 2, [0], None, DataType::F32).unwrap();
        assert!(nothing.read().unwrap().as_slice::<f32>().unwrap().is_empty());
    }

    #[test]
    fn a_view_needs_a_borrow_of_its_own_storage() {
        let (one, other) = (Tensor::zeros([1], DataType::F32).unwrap(), storage(4));
        let borrow = other.try_borrow(Access::Write).unwrap();
        assert_eq!(kind(TensorView::new(one.clone(), borrow)), ErrorKind::ApiMisuse);
        let borrow = other.try_borrow(Access::Write).unwrap();
        assert_eq!(kind(TensorViewMut::new(one.clone(), borrow)), ErrorKind::ApiMisuse);
        let borrow = one.storage().try_borrow(Access::Read).unwrap();
        assert_eq!(kind(TensorViewMut::new(one, borrow)), ErrorKind::ApiMisuse);
    }

    #[test]
    fn empty_and_scalar_tensors_work() {
        let empty = Tensor::zeros([3, 0], DataType::F64).unwrap();
        assert!(empty.storage().is_empty());
        assert!(empty.read().unwrap().as_slice::<f64>().unwrap().is_empty());
        assert!(empty.write().unwrap().as_mut_slice::<f64>().unwrap().is_empty());
        let borrow = empty.storage().try_borrow(Access::Read).unwrap();
        assert!(borrow.into_bytes(0..0).unwrap().is_empty());
        let scalar = Tensor::from_slice([], &[7_u8]).unwrap();
        assert_eq!(scalar.read().unwrap().as_slice::<u8>().unwrap(), [7]);
        assert_eq!(kind(Tensor::from_slice([2], &[7_u8])), ErrorKind::InvalidArgument);
        assert_eq!(kind(Tensor::zeros([1 << 47], DataType::U8)), ErrorKind::OutOfMemory);
    }

    #[test]
    fn a_storage_frees_its_memory_and_then_its_lease_after_the_last_borrow() {
        struct Note(&'static str, Arc<Mutex<Vec<&'static str>>>);

        impl Drop for Note {
            fn drop(&mut self) {
                self.1.lock().unwrap().push(self.0);
            }
        }

        let notes = Arc::default();
        let mut bytes = Box::new([0_u8; 4]);
        let start = std::ptr::NonNull::from(&mut *bytes).cast();
        let owner = Box::new((bytes, Note("memory", Arc::clone(&notes))));
        // SAFETY: the bytes live in the owner.
        let memory = unsafe { crate::device::HostMemory::new(start, 4, owner) };
        let lease = Box::new(Note("lease", notes.clone()));
        let storage = Storage::new(Device::cpu(), Box::new(memory), Some(lease));
        let borrow = storage.try_borrow(Access::Read).unwrap();
        let weak = Arc::downgrade(&storage);
        drop(storage);
        assert_eq!(borrow.bytes().unwrap(), [0; 4]);
        assert!(notes.lock().unwrap().is_empty());
        drop(borrow);
        assert!(Weak::upgrade(&weak).is_none());
        assert_eq!(*notes.lock().unwrap(), ["memory", "lease"]);
    }
}

mod borrows {
    use super::*;

    #[test]
    fn many_readers_or_one_writer() {
        let storage = storage(4);
        let mut first = storage.try_borrow(Access::Read).unwrap();
        let second = storage.try_borrow(Access::Read).unwrap();
        assert!(first.bytes_mut().is_none());
        assert!(storage.try_borrow(Access::Write).is_none());
        drop(first);
        assert!(storage.try_borrow(Access::Write).is_none());
        drop(second);
        let mut writer = storage.try_borrow(Access::Write).unwrap();
        writer.bytes_mut().unwrap()[0] = 1;
        assert_eq!(writer.bytes().unwrap(), [1, 0, 0, 0]);
        assert!(writer.share().is_none());
        assert!(storage.try_borrow(Access::Read).is_none());
        drop(writer);
        assert!(storage.try_borrow(Access::Read).is_some());
    }

    #[test]
    fn a_conflict_is_busy_and_never_waits() {
        let tensor = Tensor::zeros([4], DataType::U8).unwrap();
        let view = tensor.read().unwrap();
        assert!(tensor.read().is_ok());
        assert_eq!(kind(tensor.write()), ErrorKind::Busy);
        drop(view);
        let _writer = tensor.write().unwrap();
        assert_eq!(kind(tensor.read()), ErrorKind::Busy);
        assert_eq!(kind(tensor.write()), ErrorKind::Busy);
    }

    #[test]
    fn copies_reach_host_and_device_and_check_their_ranges() {
        for storage in [storage(8), remote(&[0; 8])] {
            let mut writer = storage.try_borrow(Access::Write).unwrap();
            writer.copy_in(3, &[1, 2, 3]).unwrap();
            let mut out = [9; 8];
            writer.copy_out(0, &mut out).unwrap();
            assert_eq!(out, [0, 0, 0, 1, 2, 3, 0, 0]);
            writer.copy_in(8, &[]).unwrap();
            for at in [6, 9, u64::MAX] {
                assert_eq!(kind(writer.copy_in(at, &[1, 2, 3])), ErrorKind::InvalidArgument);
                assert_eq!(kind(writer.copy_out(at, &mut out[..3])), ErrorKind::InvalidArgument);
            }
            drop(writer);
            let mut reader = storage.try_borrow(Access::Read).unwrap();
            assert_eq!(kind(reader.copy_in(0, &[1])), ErrorKind::ApiMisuse);
        }
    }

    #[test]
    fn copies_between_and_within_storages_check_their_ranges() {
        let cpu = CpuDevice::default();
        let (near, far) = (storage(4), remote(&[1, 2, 3, 4, 5, 6]));
        let mut target = near.try_borrow(Access::Write).unwrap();
        let mut source = far.try_borrow(Access::Read).unwrap();
        target.copy_from(&cpu, 1, &source, 3, 3).unwrap();
        assert_eq!(target.bytes().unwrap(), [0, 4, 5, 6]);
        target.copy_within(&cpu, 1, 0, 3).unwrap();
        assert_eq!(target.bytes().unwrap(), [4, 5, 6, 6]);
        for (at, from, len) in [(2, 0, 3), (0, 4, 3), (0, u64::MAX, 2), (u64::MAX, 0, 2)] {
            assert_eq!(kind(target.copy_from(&cpu, at, &source, from, len)), ErrorKind::InvalidArgument);
            assert_eq!(kind(target.copy_within(&cpu, from, at, len)), ErrorKind::InvalidArgument);
        }
        assert_eq!(kind(source.copy_from(&cpu, 0, &target, 0, 1)), ErrorKind::ApiMisuse);
        assert_eq!(kind(source.copy_within(&cpu, 0, 1, 1)), ErrorKind::ApiMisuse);
    }

    #[test]
    fn bytes_hold_the_borrow_until_the_last_clone_is_dropped() {
        let tensor = Tensor::from_slice([6], &[1_u8, 2, 3, 4, 5, 6]).unwrap();
        let borrow = tensor.storage().try_borrow(Access::Read).unwrap();
        let bytes = borrow.into_bytes(tensor.byte_range(1, 4).unwrap()).unwrap();
        let tail = bytes.slice(2..);
        drop(bytes);
        assert_eq!(kind(tensor.write()), ErrorKind::Busy);
        assert_eq!(tail[..], [4, 5]);
        std::thread::spawn(move || drop(tail)).join().unwrap();
        assert!(tensor.write().is_ok());
        #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
        for range in [5..7, 3..2, 0..u64::MAX] {
            assert!(tensor.storage().try_borrow(Access::Read).unwrap().into_bytes(range).is_none());
        }
        assert!(remote(&[1]).try_borrow(Access::Read).unwrap().into_bytes(0..1).is_none());
        assert!(tensor.write().is_ok());
    }

    #[test]
    fn a_leaked_borrow_keeps_the_storage_borrowed() {
        let storage = storage(1);
        std::mem::forget(storage.try_borrow(Access::Write));
        assert!(storage.try_borrow(Access::Read).is_none());
    }
}

mod waiting {
    use super::*;

    /// B-2.
    #[test]
    fn waiters_are_served_in_order_and_before_newcomers() {
        let storage = storage(1);
        let reader = storage.try_borrow(Access::Read).unwrap();
        let (_, first) = wait(&storage, Access::Write);
        let (_, second) = wait(&storage, Access::Read);
        let (_, third) = wait(&storage, Access::Read);
        let (_, fourth) = wait(&storage, Access::Write);
        assert!(storage.try_borrow(Access::Read).is_none(), "a newcomer overtook a waiting writer");
        assert!(first.try_recv().is_err());
        drop(reader);
        let writer = first.try_recv().unwrap();
        assert_eq!(writer.access(), Access::Write);
        assert!(second.try_recv().is_err());
        drop(writer);
        let readers = (second.try_recv().unwrap(), third.try_recv().unwrap());
        assert!(fourth.try_recv().is_err());
        assert!(storage.try_borrow(Access::Read).is_none());
        drop(readers);
        drop(fourth.try_recv().unwrap());
        assert!(storage.try_borrow(Access::Write).is_some());
    }

    #[test]
    fn readers_may_join_readers_past_the_queue_on_purpose() {
        let storage = storage(1);
        let reader = storage.try_borrow(Access::Read).unwrap();
        let (_, writer) = wait(&storage, Access::Write);
        let shared = reader.share().unwrap();
        drop(reader);
        let joined = storage.try_read().unwrap();
        drop(shared);
        assert!(writer.try_recv().is_err());
        drop(joined);
        let writer = writer.try_recv().unwrap();
        assert!(storage.try_read().is_none());
        drop(writer);
    }

    /// B-3.
    #[test]
    fn a_borrow_dropped_on_another_thread_resumes_exactly_once() {
        let storage = storage(1);
        let borrow = storage.try_borrow(Access::Write).unwrap();
        let resumed = Arc::new(AtomicUsize::new(0));
        let (sender, receiver) = mpsc::channel();
        let counter = resumed.clone();
        let queued = storage.borrow_or_wait(
            Access::Write,
            Box::new(move |borrow| {
                counter.fetch_add(1, Ordering::Relaxed);
                _ = sender.send((std::thread::current().id(), borrow));
            }),
        );
        assert!(queued.is_err());
        let thread = std::thread::spawn(move || drop(borrow));
        let id = thread.thread().id();
        thread.join().unwrap();
        let (resumed_on, borrow) = receiver.try_recv().unwrap();
        assert_eq!(resumed_on, id);
        drop(borrow);
        assert_eq!(resumed.load(Ordering::Relaxed), 1);
        assert!(storage.try_borrow(Access::Write).is_some());
    }

    /// B-3: the callback may use the storage, which it could not if a lock were held.
    #[test]
    fn a_resumed_waiter_may_use_the_storage_and_wait_again() {
        let storage = storage(1);
        let borrow = storage.try_borrow(Access::Write).unwrap();
        let (resume, again) = sends();
        let mine = storage.clone();
        let queued = storage.borrow_or_wait(
            Access::Write,
            Box::new(move |borrow| {
                assert!(mine.borrow_or_wait(Access::Write, resume).is_err());
                drop(borrow);
            }),
        );
        assert!(queued.is_err());
        drop(borrow);
        assert_eq!(again.try_recv().unwrap().access(), Access::Write);
    }

    /// B-3: a waiter that panics passes its borrow on, and the drop that resumed it does not panic.
    #[test]
    fn a_panicking_waiter_harms_nobody() {
        let storage = storage(1);
        let borrow = storage.try_borrow(Access::Write).unwrap();
        let queued = storage.borrow_or_wait(Access::Write, Box::new(|_| panic!("on purpose")));
        assert!(queued.is_err());
        let (_, next) = wait(&storage, Access::Write);
        drop(borrow);
        assert!(next.try_recv().is_ok());
        assert!(storage.try_borrow(Access::Write).is_some());
    }

    #[test]
    fn thousands_of_waiters_that_drop_their_borrow_need_no_stack() {
        let storage = storage(1);
        let borrow = storage.try_borrow(Access::Write).unwrap();
        for _ in 0..100_000 {
            assert!(storage.borrow_or_wait(Access::Write, Box::new(drop)).is_err());
        }
        let (_, last) = wait(&storage, Access::Write);
        drop(borrow);
        assert!(last.try_recv().is_ok());
    }

    /// B-3 and B-4.
    #[test]
    fn a_waiter_that_stops_is_not_resumed_and_blocks_no_other() {
        let storage = storage(1);
        let reader = storage.try_borrow(Access::Read).unwrap();
        let (writer, handed) = wait(&storage, Access::Write);
        let (behind, shared) = wait(&storage, Access::Read);
        assert!(writer.stop());
        assert!(!writer.stop());
        assert!(handed.recv().is_err(), "the resume function is still there");
        assert!(!behind.stop());
        assert_eq!(shared.try_recv().unwrap().access(), Access::Read);
        drop(reader);
        assert!(storage.try_borrow(Access::Write).is_some());
        drop(storage);
        assert!(!writer.stop());
    }

    /// B-1 and B-4 under contention: no thread sees a torn write, and every thread gets a turn.
    #[test]
    fn threads_that_wait_see_no_torn_writes() {
        let tensor = Tensor::zeros([16], DataType::U64).unwrap();
        let threads: Vec<_> = (0..4_u64)
            .map(|thread| {
                let tensor = tensor.clone();
                std::thread::spawn(move || {
                    for round in 0..500_u64 {
                        let access = if (thread + round) % 3 == 0 { Access::Write } else { Access::Read };
                        let (resume, receiver) = sends();
                        let borrow = tensor
                            .storage()
                            .borrow_or_wait(access, resume)
                            .unwrap_or_else(|_| receiver.recv().expect("the borrow is handed over"));
                        if access == Access::Write {
                            let mut view = TensorViewMut::new(tensor.clone(), borrow).unwrap();
                            let words = view.as_mut_slice::<u64>().unwrap();
                            words.iter_mut().for_each(|word| *word += 1);
                        } else {
                            let view = TensorView::new(tensor.clone(), borrow).unwrap();
                            let words = view.as_slice::<u64>().unwrap();
                            assert!(words.iter().all(|word| *word == words[0]));
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let writes =
            (0..4_u64).map(|thread| (0..500).filter(|round| (thread + round) % 3 == 0).count() as u64).sum::<u64>();
        assert_eq!(tensor.read().unwrap().as_slice::<u64>().unwrap(), [writes; 16]);
    }

    #[test]
    fn one_call_takes_all_its_borrows_in_the_requested_order() {
        let (one, two) = (storage(1), storage(2));
        let wanted = vec![(two.clone(), Access::Read), (one.clone(), Access::Write), (two.clone(), Access::Read)];
        let ready = borrow_all(wanted, Box::new(|_| panic!("not needed"))).unwrap().unwrap();
        assert_eq!(ready.iter().map(|borrow| borrow.storage().len()).collect::<Vec<_>>(), [2, 1, 2]);
        assert_eq!(ready[1].access(), Access::Write);
        drop(ready);
        for access in [Access::Read, Access::Write] {
            let wanted = vec![(one.clone(), access), (two.clone(), Access::Read), (one.clone(), Access::Write)];
            let error = borrow_all(wanted, Box::new(drop)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert!(error.message().contains("tensors 0 and 2"));
        }
        assert!(borrow_all(Vec::new(), Box::new(drop)).unwrap().unwrap().is_empty());
    }

    #[test]
    fn one_call_waits_for_each_of_its_borrows() {
        let storages = [storage(1), storage(2), storage(3)];
        let mut held: Vec<_> = storages.iter().map(|storage| storage.try_borrow(Access::Read).unwrap()).collect();
        let wanted = storages.iter().map(|storage| (storage.clone(), Access::Write)).collect();
        let (sender, receiver) = mpsc::channel();
        assert!(borrow_all(wanted, Box::new(move |borrows| _ = sender.send(borrows))).unwrap().is_none());
        while let Some(borrow) = held.pop() {
            assert!(receiver.try_recv().is_err());
            drop(borrow);
        }
        let borrows = receiver.try_recv().unwrap();
        assert_eq!(borrows.iter().map(|borrow| borrow.storage().len()).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn calls_that_want_the_same_storages_in_any_order_never_deadlock() {
        let storages: Vec<_> = (0..3).map(|_| storage(1)).collect();
        let (sender, finished) = mpsc::channel();
        for thread in 0..4 {
            let (storages, sender) = (storages.clone(), sender.clone());
            std::thread::spawn(move || {
                for round in 0..300 {
                    let mut wanted: Vec<_> = storages.iter().map(|storage| (storage.clone(), Access::Write)).collect();
                    wanted.rotate_left((thread + round) % 3);
                    wanted.truncate(2);
                    let (ready, receiver) = mpsc::channel();
                    let borrows = borrow_all(wanted, Box::new(move |borrows| _ = ready.send(borrows))).unwrap();
                    drop(borrows.unwrap_or_else(|| receiver.recv().expect("the borrows are handed over")));
                }
                sender.send(()).unwrap();
            });
        }
        for _ in 0..4 {
            finished.recv_timeout(std::time::Duration::from_secs(60)).expect("a deadlock");
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Try(Access),
        Queue(Access),
        Share(usize),
        Release(usize),
        Stop(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
        prop_oneof![
            1 => access.clone().prop_map(Step::Try),
            3 => access.prop_map(Step::Queue),
            1 => any::<usize>().prop_map(Step::Share),
            3 => any::<usize>().prop_map(Step::Release),
            1 => any::<usize>().prop_map(Step::Stop),
        ]
    }

    /// Reference model of the rules: the holders and the queue of waiters.
    #[derive(Default)]
    struct Model {
        holders: Vec<(usize, Access)>,
        queue: VecDeque<(usize, Access)>,
    }

    impl Model {
        fn fits(&self, access: Access) -> bool {
            self.holders.is_empty()
                || access == Access::Read && self.holders.iter().all(|(_, access)| *access == Access::Read)
        }

        fn settle(&mut self) {
            while let Some(next) = self.queue.front().copied().filter(|(_, access)| self.fits(*access)) {
                self.queue.pop_front();
                self.holders.push(next);
            }
        }
    }

    proptest! {
        /// B-1 to B-4 against the model, with every borrow known by name.
        #[test]
        fn borrows_behave_as_the_model(steps in prop::collection::vec(step(), 0..120)) {
            let storage = storage(1);
            let handed = Arc::new(Mutex::new(Vec::new()));
            let mut held: Vec<(usize, Borrow)> = Vec::new();
            let mut tickets: Vec<(usize, PendingBorrow)> = Vec::new();
            let mut model = Model::default();
            for (name, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Try(access) => {
                        let got = storage.try_borrow(access);
                        prop_assert_eq!(got.is_some(), model.queue.is_empty() && model.fits(access));
                        if let Some(borrow) = got {
                            held.push((name, borrow));
                            model.holders.push((name, access));
                        }
                    }
                    Step::Queue(access) => {
                        let to = handed.clone();
                        let resume = Box::new(move |borrow| to.lock().unwrap().push((name, borrow)));
                        let at_once = model.queue.is_empty() && model.fits(access);
                        match storage.borrow_or_wait(access, resume) {
                            Ok(borrow) => held.push((name, borrow)),
                            Err(ticket) => tickets.push((name, ticket)),
                        }
                        prop_assert_eq!(held.last().is_some_and(|(last, _)| *last == name), at_once);
                        model.queue.push_back((name, access));
                        if at_once { model.settle(); }
                    }
                    Step::Share(which) => if !held.is_empty() {
                        let (_, borrow) = &held[which % held.len()];
                        let shared = borrow.share();
                        prop_assert_eq!(shared.is_some(), borrow.access() == Access::Read);
                        if let Some(shared) = shared {
                            held.push((name, shared));
                            model.holders.push((name, Access::Read));
                        }
                    },
                    Step::Release(which) => if !held.is_empty() {
                        let (name, borrow) = held.swap_remove(which % held.len());
                        drop(borrow);
                        model.holders.retain(|(holder, _)| *holder != name);
                        model.settle();
                    },
                    Step::Stop(which) => if !tickets.is_empty() {
                        let (name, ticket) = tickets.swap_remove(which % tickets.len());
                        prop_assert_eq!(ticket.stop(), model.queue.iter().any(|(waiter, _)| *waiter == name));
                        model.queue.retain(|(waiter, _)| *waiter != name);
                        model.settle();
                    },
                }
                held.append(&mut handed.lock().unwrap());
                let mut names: Vec<_> = held.iter().map(|(name, borrow)| (*name, borrow.access())).collect();
                let mut expected = model.holders.clone();
                names.sort_by_key(|(name, _)| *name);
                expected.sort_by_key(|(name, _)| *name);
                prop_assert_eq!(names, expected);
            }
        }
    }
}
