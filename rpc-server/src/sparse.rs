//! Writing without long runs of zeros, so that the copy of a file with holes has holes, too.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;

/// Length of the aligned blocks that are left out if they have zeros alone: large enough for a hole
/// to be worth more than a longer write.
const BLOCK: usize = 64 << 10;

/// Maximum length of the zeros at the end that the file's length leaves out: what is lost of them
/// when the process is killed.
const UNRECORDED: u64 = 64 << 20;

/// Writes `bytes` at `offset` to a file that has no bytes from there on, without the blocks that
/// have zeros alone. Returns the end of what was written. The caller sets the length of the file.
pub(crate) fn write_data(file: &File, offset: u64, bytes: &[u8]) -> io::Result<u64> {
    let mut end = offset;
    let mut write = |start: usize, data: &[u8]| {
        if data.is_empty() {
            return Ok(());
        }
        let at = offset + start as u64;
        end = at + data.len() as u64;
        file.write_all_at(data, at)
    };
    // Length of the block that `offset` is in, as far as it is behind it.
    let first = BLOCK - (offset % BLOCK as u64) as usize;
    let (mut start, mut at) = (0, 0);
    while at < bytes.len() {
        let next = bytes.len().min(if at == 0 { first } else { at + BLOCK });
        // A block at an edge is written.
        if next - at == BLOCK && is_zero(&bytes[at..next]) {
            write(start, &bytes[start..at])?;
            start = next;
        }
        at = next;
    }
    write(start, &bytes[start..])?;
    Ok(end)
}

fn is_zero(block: &[u8]) -> bool {
    static ZEROS: [u8; BLOCK] = [0; BLOCK];
    block == &ZEROS[..block.len()]
}

/// Writer of a file, from a position behind which it has no bytes. [`flush`](Write::flush) and
/// dropping the writer set the length of the file, so that zeros at its end are not lost.
#[derive(Debug)]
pub(crate) struct SparseWriter {
    file: File,
    position: u64,
    /// End of the bytes that the file has.
    end: u64,
}

impl SparseWriter {
    pub(crate) fn new(file: File, position: u64) -> Self {
        Self { file, position, end: position }
    }
}

impl Write for SparseWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let end = write_data(&self.file, self.position, bytes)?;
        // Otherwise nothing was written.
        if end > self.position {
            self.end = end;
        }
        self.position += bytes.len() as u64;
        if self.position - self.end >= UNRECORDED {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.end < self.position {
            self.file.set_len(self.position)?;
            self.end = self.position;
        }
        Ok(())
    }
}

impl Drop for SparseWriter {
    fn drop(&mut self) {
        // The zeros at the end are sent again if this fails.
        let _ = self.flush();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_no_blocks_for_long_runs_of_zeros() {
        for len in [40 * BLOCK + 17, 40 * BLOCK] {
            let mut content = vec![0; len];
            for (at, byte) in [(3, 1), (5 * BLOCK + 1, 2), (20 * BLOCK - 1, 3)] {
                content[at] = byte;
            }
            let folder = tempfile::tempdir().unwrap();
            for (start, piece) in [(0, 1 << 20), (0, BLOCK), (0, 1000), (7, 1 << 20), (3 * BLOCK - 1, 8 * BLOCK + 5)] {
                let path = folder.path().join("copy");
                fs::write(&path, &content[..start]).unwrap();
                let mut writer = SparseWriter::new(File::options().write(true).open(&path).unwrap(), start as u64);
                content[start..].chunks(piece).for_each(|piece| writer.write_all(piece).unwrap());
                writer.flush().unwrap();
                assert!(fs::read(&path).unwrap() == content, "{start} {piece}");
                let disk = fs::metadata(&path).unwrap().blocks() * 512;
                assert!(piece < BLOCK || disk < len as u64 / 2, "{start} {piece}: {disk}");
            }
        }
    }

    #[test]
    fn zeros_at_the_end_count_when_the_writer_is_dropped_and_at_intervals_before() {
        let file = tempfile::tempfile().unwrap();
        let len = || file.metadata().unwrap().len();
        let mut writer = SparseWriter::new(file.try_clone().unwrap(), 0);
        writer.write_all(&[0; 4 * BLOCK]).unwrap();
        drop(writer);
        assert_eq!(len(), 4 * BLOCK as u64);

        let mut writer = SparseWriter::new(file.try_clone().unwrap(), len());
        let zeros = vec![0; 1 << 20];
        for _ in 0..UNRECORDED >> 20 {
            writer.write_all(&zeros).unwrap();
        }
        assert_eq!(len(), 4 * BLOCK as u64 + UNRECORDED);
        // What follows the zeros is where it belongs.
        writer.write_all(&[0; BLOCK]).unwrap();
        writer.write_all(b"end").unwrap();
        drop(writer);
        assert_eq!(len(), 5 * BLOCK as u64 + UNRECORDED + 3);
    }
}
