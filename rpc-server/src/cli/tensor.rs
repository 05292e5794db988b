//! Tensors and `.npy` files: upload, download, and display. No file is ever in memory as a whole.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use bytes::{Bytes, BytesMut};
use rpc_core::dlpack::from_bytes;
use rpc_core::{DataType, Device, RemoteTensor, Session};
use serde_json::Value as Json;

use super::failure::Failure;
use super::new_file::NewFile;
use super::output::Output;
use crate::cli::npy::{NpyError, read_header, write_header};

/// Length of a piece of a file in bytes. Two are in memory: one is read or written while the other
/// is copied.
const PIECE: usize = 8 << 20;

/// Copies the array in `file` into a new tensor on `cpu:0`.
pub(super) async fn upload(session: &Session, output: &Output, file: &Path) -> Result<RemoteTensor, Failure> {
    let opened = File::open(file).map_err(|error| Failure::file("cannot open", file, error))?;
    let known_len = opened.metadata().ok().filter(fs::Metadata::is_file).map(|metadata| metadata.len());
    let mut reader = BufReader::new(opened);
    let npy = |source: NpyError| Failure::Npy { file: file.to_owned(), source };
    let header = read_header(&mut reader).map_err(npy)?;
    let len = header.data_len_bytes();
    if let Some(there) = known_len
        && there != header.data_offset.saturating_add(len)
    {
        let there = there.saturating_sub(header.data_offset);
        return Err(wrong_length(file, len, there));
    }
    let tensor = session.alloc(Device::cpu(), header.dtype, &header.shape).await?;
    let bar = output.progress(&file.display().to_string(), Some(len));
    let mut reader = Some(reader);
    let mut offset = 0;
    let mut piece = read_piece(&mut reader, len).await.map_err(|error| Failure::file("cannot read", file, error))?;
    while !piece.is_empty() {
        let end = offset + piece.len() as u64;
        let copy = session.copy_to_remote_at(&tensor, offset, piece);
        let (copied, next) = tokio::join!(copy.into_future(), read_piece(&mut reader, len - end));
        copied?;
        piece = next.map_err(|error| Failure::file("cannot read", file, error))?;
        offset = end;
        bar.set_position(offset);
    }
    bar.finish_and_clear();
    if offset < len { Err(wrong_length(file, len, offset)) } else { Ok(tensor) }
}

fn wrong_length(file: &Path, expected: u64, there: u64) -> Failure {
    Failure::Unsuitable(format!(
        "{} should have {expected} bytes of elements, and has {there}; copy or save it again",
        file.display()
    ))
}

/// Reads the next piece of at most `left` bytes; empty at the end.
async fn read_piece(reader: &mut Option<BufReader<File>>, left: u64) -> io::Result<Bytes> {
    let Some(mut source) = reader.take().filter(|_| left > 0) else { return Ok(Bytes::new()) };
    let read = tokio::task::spawn_blocking(move || {
        let mut piece = Vec::with_capacity(PIECE.min(usize::try_from(left).unwrap_or(PIECE)));
        let outcome = source.by_ref().take(left.min(PIECE as u64)).read_to_end(&mut piece);
        outcome.map(|_| (source, Bytes::from(piece)))
    });
    let (source, piece) = read.await.map_err(io::Error::other)??;
    *reader = Some(source);
    Ok(piece)
}

/// Stores `tensor` in `file`, which appears when it is complete.
pub(super) async fn store(
    session: &Session,
    output: &Output,
    tensor: &RemoteTensor,
    file: &Path,
) -> Result<(), Failure> {
    let mut target = NewFile::create(file, output)?;
    write_header(&mut target, tensor.dtype(), tensor.shape())
        .map_err(|source| Failure::Npy { file: file.to_owned(), source })?;
    let len = tensor.size_bytes();
    let bar = output.progress(&file.display().to_string(), Some(len));
    let mut buffer = BytesMut::new();
    let mut offset = 0;
    while offset < len {
        let end = len.min(offset + PIECE as u64);
        buffer = session.copy_from_remote_into(tensor, offset..end, buffer).await?;
        target.write_all(&buffer).map_err(|error| Failure::file("cannot write", file, error))?;
        offset = end;
        bar.set_position(offset);
    }
    bar.finish_and_clear();
    target.persist()
}

/// Returns the elements of a tensor of `shape` as nested lists; `None` for types without numbers in
/// JSON.
pub(super) fn elements(bytes: &[u8], dtype: DataType, shape: &[i64]) -> Option<Json> {
    let flat: Vec<Json> = match dtype {
        DataType::BOOL => bytes.iter().map(|byte| Json::from(*byte != 0)).collect(),
        DataType::I8 => numbers::<i8>(bytes),
        DataType::I16 => numbers::<i16>(bytes),
        DataType::I32 => numbers::<i32>(bytes),
        DataType::I64 => numbers::<i64>(bytes),
        DataType::U8 => numbers::<u8>(bytes),
        DataType::U16 => numbers::<u16>(bytes),
        DataType::U32 => numbers::<u32>(bytes),
        DataType::U64 => numbers::<u64>(bytes),
        DataType::F16 => from_bytes::<half::f16>(bytes).into_iter().map(|value| short_float(value.to_f32())).collect(),
        DataType::BF16 => {
            from_bytes::<half::bf16>(bytes).into_iter().map(|value| short_float(value.to_f32())).collect()
        }
        DataType::F32 => from_bytes::<f32>(bytes).into_iter().map(short_float).collect(),
        DataType::F64 => from_bytes::<f64>(bytes).into_iter().map(float).collect(),
        _ => return None,
    };
    nest(flat, shape)
}

fn numbers<T: rpc_core::Element + Into<Json>>(bytes: &[u8]) -> Vec<Json> {
    from_bytes::<T>(bytes).into_iter().map(Into::into).collect()
}

/// Returns a float as JSON; a string if it is not a JSON number.
pub(super) fn float(value: f64) -> Json {
    serde_json::Number::from_f64(value).map_or_else(|| Json::from(value.to_string()), Json::Number)
}

/// Returns the shortest number that reads back as the same `f32`, instead of the digits of the
/// `f64`.
fn short_float(value: f32) -> Json {
    float(value.to_string().parse().unwrap_or_else(|_| f64::from(value)))
}

/// Folds a flat list into nested lists of `shape`.
fn nest(flat: Vec<Json>, shape: &[i64]) -> Option<Json> {
    let Some((&outermost, inner)) = shape.split_first() else { return flat.into_iter().next() };
    let rows = usize::try_from(outermost).ok()?;
    if inner.is_empty() {
        return Some(Json::Array(flat));
    }
    let row_len = flat.len().checked_div(rows).unwrap_or(0);
    let mut rest = flat.into_iter();
    let rows = (0..rows).map(|_| nest(rest.by_ref().take(row_len).collect(), inner));
    rows.collect::<Option<Vec<_>>>().map(Json::Array)
}

/// Formats nested lists, one line for each innermost list.
pub(super) fn lists(value: &Json, indent: usize) -> String {
    let Json::Array(items) = value else {
        return match value {
            Json::String(text) => text.clone(),
            number => number.to_string(),
        };
    };
    let nested = items.first().is_some_and(Json::is_array);
    let separator = if nested { format!(",\n{}", " ".repeat(indent + 1)) } else { ", ".to_owned() };
    let items: Vec<_> = items.iter().map(|item| lists(item, indent + 1)).collect();
    format!("[{}]", items.join(&separator))
}

#[cfg(test)]
mod tests {
    use rpc_core::dlpack::to_bytes;
    use serde_json::json;

    use super::*;

    #[test]
    fn elements_are_nested_by_shape_and_keep_their_shortest_digits() {
        let bytes = to_bytes(&[0.1_f32, 1.0, f32::NAN, -2.5, 3.0, 4.0]);
        let nested = elements(&bytes, DataType::F32, &[2, 3]).unwrap();
        assert_eq!(nested, json!([[0.1, 1.0, "NaN"], [-2.5, 3.0, 4.0]]));
        assert_eq!(lists(&nested, 0), "[[0.1, 1.0, NaN],\n [-2.5, 3.0, 4.0]]");
        assert_eq!(elements(&to_bytes(&[7_u64]), DataType::U64, &[]).unwrap(), json!(7));
        assert_eq!(elements(&[], DataType::I8, &[2, 0]).unwrap(), json!([[], []]));
        assert_eq!(elements(&[0, 1], DataType::BOOL, &[2]).unwrap(), json!([false, true]));
        assert!(elements(&[0], "float8_e4m3fn".parse().unwrap(), &[1]).is_none());
    }
}
