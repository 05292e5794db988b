//! Signatures of kernels in PTX: the sizes of their parameters, for drivers that do not report
//! them.

/// Returns the sizes in bytes of the parameters of a kernel; `None` if the text has no such kernel,
/// or one whose parameters cannot be read.
pub(super) fn parameter_sizes(ptx: &str, kernel: &str) -> Option<Vec<usize>> {
    let text = without_comments(ptx);
    let mut rest = &text[..];
    loop {
        let (_, entry) = rest.split_once(".entry")?;
        rest = entry;
        let entry = entry.trim_start();
        let end = entry.find(|character: char| !character.is_ascii_alphanumeric() && !"_$%".contains(character))?;
        let (name, behind) = entry.split_at(end);
        if name == kernel {
            let (list, _) = behind.trim_start().strip_prefix('(')?.split_once(')')?;
            return list.split(',').map(str::trim).filter(|one| !one.is_empty()).map(parameter_size).collect();
        }
    }
}

/// Returns the size of a parameter, such as `.param .align 8 .b8 name[24]`.
fn parameter_size(declaration: &str) -> Option<usize> {
    let (mut size, mut count) = (None, 1);
    let mut words = declaration.split_whitespace();
    while let Some(word) = words.next() {
        if word == ".align" {
            words.next()?;
        } else if let Some(attribute) = word.strip_prefix('.') {
            size = size.or(type_size(attribute));
        } else if let Some((_, len)) = word.split_once('[') {
            count = len.strip_suffix(']')?.parse().ok()?;
        }
    }
    size?.checked_mul(count)
}

/// Returns the size of a type, without its dot; `None` for what is no type.
fn type_size(name: &str) -> Option<usize> {
    let bits = name.strip_prefix(['b', 'u', 's', 'f'])?;
    match bits {
        "8" => Some(1),
        "16" => Some(2),
        "32" => Some(4),
        "64" => Some(8),
        "128" => Some(16),
        _ => None,
    }
}

/// Returns the text with a space for each comment.
fn without_comments(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(at) = rest.find('/') {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = match rest.as_bytes().get(1) {
            Some(b'/') => rest.find('\n'),
            Some(b'*') => rest.find("*/").map(|end| end + 2),
            _ => {
                text.push('/');
                Some(1)
            }
        };
        text.push(' ');
        rest = end.map_or("", |end| &rest[end..]);
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "
        .version 8.0 .target sm_80 .address_size 64 // .entry scale(.param .u8 wrong)
        .visible .entry scale(
            .param .u64 .ptr .global .align 16 scale_param_0, /* the data, */
            .param .f32 scale_param_1,
            .param .u32 scale_param_2
        ) .maxntid 256, 1, 1
        { ret; }
        .visible .entry scale_all ( .param .align 8 .b8 scale_all_param_0[24], .param .f64 p, .param .s16 q ) { ret; }
        .entry nothing() { ret; }
        .entry bare { ret; }
        .entry odd(.param .texref t) { ret; }";

    #[test]
    fn sizes_follow_from_the_declarations() {
        assert_eq!(parameter_sizes(PTX, "scale"), Some(vec![8, 4, 4]));
        assert_eq!(parameter_sizes(PTX, "scale_all"), Some(vec![24, 8, 2]));
        assert_eq!(parameter_sizes(PTX, "nothing"), Some(vec![]));
        for unknown in ["bare", "odd", "scal", "missing", ""] {
            assert_eq!(parameter_sizes(PTX, unknown), None, "{unknown}");
        }
        for cut in 0..PTX.len() {
            _ = parameter_sizes(&PTX[..cut], "scale_all");
        }
    }
}
