//! Unit tests of finding and opening the files of a model.

use std::fs;

use super::*;

fn model(json: &str) -> (tempfile::TempDir, Result<Model>) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(INDEX), json).unwrap();
    let model = Model::find(folder.path());
    (folder, model)
}

fn file() -> Vec<u8> {
    let json = br#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
    [&(json.len() as u64).to_le_bytes()[..], json, b"abc"].concat()
}

#[test]
fn a_path_is_a_file_an_index_or_a_folder() {
    let (folder, model) = model(r#"{"metadata":{"total_size":1},"weight_map":{"b":"2.st","a":"sub/1.st","c":"2.st"}}"#);
    let model = model.unwrap();
    assert_eq!(model.folder, folder.path());
    assert_eq!(model.files, ["2.st", "sub/1.st"]);
    let index = [("a".to_owned(), 1), ("b".to_owned(), 0), ("c".to_owned(), 0)];
    assert_eq!(model.index, Some(index.into()));

    fs::remove_file(folder.path().join(INDEX)).unwrap();
    let error = Model::find(folder.path()).unwrap_err().to_string();
    assert!(error.contains("neither model.safetensors.index.json nor model.safetensors"), "{error}");
    fs::write(folder.path().join(SINGLE), file()).unwrap();
    let model = Model::find(folder.path()).unwrap();
    assert!(model.files == [SINGLE] && model.index.is_none());
    let model = Model::find(&folder.path().join(SINGLE)).unwrap();
    assert!(model.files == [SINGLE] && model.folder == folder.path());
    assert_eq!(Model::find(&folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_malformed_index_is_an_error() {
    let cases = [
        ("", "EOF"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":[]}"#, "an object of file names"),
        (r#"{"weight_map":{"a":1}}"#, "expected a string"),
        (r#"{"weight_map":{"a":"x","a":"y"}}"#, "tensor 'a' is there twice"),
        (r#"{"weight_map":{"a":"../x"}}"#, "'../x', which is not below"),
        (r#"{"weight_map":{"a":"sub/../../x"}}"#, "which is not below"),
        (r#"{"weight_map":{"a":"/etc/passwd"}}"#, "'/etc/passwd', which is not below"),
        (r#"{"weight_map":{"a":""}}"#, "'', which is not below"),
        (r#"{"weight_map":{"a":"."}}"#, "'.', which is not below"),
    ];
    for (json, expected) in cases {
        let error = model(json).1.unwrap_err();
        assert!(error.message().contains(expected) && error.message().contains(INDEX), "{json}: {error}");
    }
}

#[test]
fn a_file_that_has_changed_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let read = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        WeightFile::read(path.clone())
    };
    let first = read(&file()).unwrap();
    let opened = InFile { file: first.open().unwrap(), path: path.clone(), start: first.header.tensors["x"].start };
    let mut bytes = [0; 2];
    opened.read_at(1, &mut bytes).unwrap();
    assert_eq!(&bytes, b"bc");
    let error = opened.read_at(2, &mut bytes).unwrap_err().to_string();
    assert!(error.contains("cut off") && error.contains(path.to_str().unwrap()), "{error}");

    // Another file, even with the same content, may be another model.
    fs::rename(&path, folder.path().join("old")).unwrap();
    assert_eq!(first.open().unwrap_err().kind(), ErrorKind::NotFound);
    let second = read(&file()).unwrap();
    assert_eq!(first.identity, second.identity);
    assert!(first.open().unwrap_err().to_string().contains("has changed"));

    let longer = [file(), b"d".to_vec()].concat();
    let error = read(&longer).unwrap_err().to_string();
    assert!(error.contains("nothing may follow") && error.contains(path.to_str().unwrap()), "{error}");
    let other = String::from_utf8_lossy(&file()).replace("\"x\"", "\"y\"");
    assert_ne!(read(other.as_bytes()).unwrap().identity, second.identity);
    let error = WeightFile::read(folder.path().to_owned()).unwrap_err().to_string();
    assert!(error.contains("no regular file"), "{error}");
}

/// A pipe is not waited for.
#[test]
fn a_pipe_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    let error = WeightFile::read(path).unwrap_err().to_string();
    assert!(error.contains("no regular file"), "{error}");
}
