//! Tickets: the waits of callers for reports of workers, by number.

use std::task::Waker;

use rpc_core::{DataType, ErrorKind, LocalValue, Result, RpcError, Tensor};

use crate::error::{DiscoError, Failure};

/// A wait of a caller for reports of workers, or for the content of a register.
pub(super) struct Ticket {
    /// Number of workers that have yet to report.
    pub(super) waiting: u32,
    /// Tensor whose bytes are being received, or why it cannot be.
    pub(super) incoming: Option<Result<IncomingTensor>>,
    pub(super) content: Option<std::result::Result<LocalValue, Failure>>,
    pub(super) waker: Option<Waker>,
    /// Error of the wait, once a worker was lost meanwhile.
    pub(super) failed: Option<DiscoError>,
}

/// A tensor whose bytes are being received, in their order. Its memory is zeroed by the system,
/// page by page as it is written, so that a worker makes the controller hold as much as it sends,
/// whatever shape it has announced.
pub(super) struct IncomingTensor {
    tensor: Tensor,
    received: u64,
}

impl IncomingTensor {
    /// Begins to receive a tensor of this type and shape.
    ///
    /// # Errors
    ///
    /// There is no such tensor, or no room for its addresses.
    pub(super) fn new(dtype: DataType, shape: Vec<i64>) -> Result<Self> {
        let tensor = Tensor::zeros(shape, dtype);
        let tensor = tensor.map_err(|error| error.context("the controller cannot hold the tensor of a worker"))?;
        Ok(Self { tensor, received: 0 })
    }

    /// Takes the bytes at `offset`, which must be the next ones.
    ///
    /// # Errors
    ///
    /// They are not, or are more than the tensor has.
    pub(super) fn fill(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        if offset != self.received {
            let text = format!("a worker sent the bytes of a tensor from {offset} on after {}", self.received);
            return Err(RpcError::new(ErrorKind::Protocol, text));
        }
        let range = self.tensor.byte_range(offset, bytes.len() as u64).map_err(|error| {
            RpcError::new(ErrorKind::Protocol, format!("a worker sent too much: {}", error.message()))
        })?;
        let (_, mut borrow) = self.tensor.write()?.into_parts();
        borrow.copy_in(range.start, bytes)?;
        self.received += bytes.len() as u64;
        Ok(())
    }

    /// Returns the tensor, once all of its bytes have come.
    ///
    /// # Errors
    ///
    /// Some are missing.
    pub(super) fn finish(self) -> Result<Tensor> {
        let (received, wanted) = (self.received, self.tensor.size_bytes());
        if received != wanted {
            let text = format!("a worker sent {received} of the {wanted} bytes of a tensor");
            return Err(RpcError::new(ErrorKind::Protocol, text));
        }
        Ok(self.tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(shape: &[i64]) -> IncomingTensor {
        IncomingTensor::new(DataType::U8, shape.to_vec()).unwrap()
    }

    #[test]
    fn a_tensor_is_complete_with_all_of_its_bytes_in_order() {
        let mut tensor = incoming(&[2, 3]);
        tensor.fill(0, &[1, 2, 3, 4]).unwrap();
        tensor.fill(4, &[5, 6]).unwrap();
        assert_eq!(tensor.finish().unwrap().read().unwrap().as_slice::<u8>().unwrap(), [1, 2, 3, 4, 5, 6]);

        let protocol = |result: Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::Protocol);
        let mut tensor = incoming(&[2, 3]);
        protocol(tensor.fill(1, &[1]));
        protocol(tensor.fill(0, &[0; 7]));
        tensor.fill(0, &[0; 5]).unwrap();
        protocol(tensor.fill(4, &[0]));
        protocol(tensor.finish().map(drop));
    }

    /// A shape alone costs nothing: the pages of a tensor are made as they are written.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_shape_alone_takes_no_memory() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
        };
        let before = resident();
        let mut tensor = incoming(&[1 << 30]);
        tensor.fill(0, &[1; 1 << 20]).unwrap();
        // Other tests of the process take memory at the same time, far less than that.
        assert!(resident() < before + (512 << 20));
        assert!(IncomingTensor::new(DataType::U8, vec![i64::MAX, i64::MAX]).is_err());
    }
}
