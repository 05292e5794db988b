//! Checks of a text in OpenCL C before a compiler reads it.

use rpc_core::error::{Result, RpcError};

/// Checks that a text of a client does not name other files, whose lines the log of the compiler
/// would tell. Looks at directives wherever they could be, in comments and texts as well: it is no
/// compiler, and what it lets pass must not depend on how well it knows one.
///
/// # Errors
///
/// [`ErrorKind::InvalidArgument`](rpc_core::ErrorKind::InvalidArgument), with the name of the
/// directive.
pub(super) fn check_names_no_file(text: &str) -> Result<()> {
    let joined = join_lines(text);
    let refuse = |found: &str| {
        Err(RpcError::invalid_argument(format!("{found} names another file, and a module's source is one file")))
    };
    let starts = joined.match_indices('#').chain(joined.match_indices("%:"));
    for (at, start) in starts {
        let name = identifier(skip_space(&joined[at + start.len()..]));
        if ["include", "include_next", "import", "embed"].contains(&name) {
            return refuse(&format!("#{name}"));
        }
    }
    let questions = ["__has_include", "__has_embed"];
    if let Some(found) = questions.into_iter().find(|question| joined.contains(question)) {
        return refuse(found);
    }
    // As `#pragma GCC dependency` and by the operator of that name.
    if joined.contains("ragma") && joined.contains("dependency") {
        return refuse("the pragma `dependency`");
    }
    Ok(())
}

/// Returns the text without trigraphs and with the lines joined that a backslash continues.
fn join_lines(text: &str) -> String {
    let text = text.replace("??=", "#").replace("??/", "\\");
    let mut joined = String::with_capacity(text.len());
    let mut rest = &text[..];
    while let Some(at) = rest.find('\\') {
        let behind = rest[at + 1..].trim_start_matches(|space: char| space.is_whitespace() && !is_line_end(space));
        let line = ["\r\n", "\n\r", "\n", "\r"].into_iter().find_map(|end| behind.strip_prefix(end));
        match line {
            Some(line) => {
                joined.push_str(&rest[..at]);
                rest = line;
            }
            None => {
                joined.push_str(&rest[..=at]);
                rest = &rest[at + 1..];
            }
        }
    }
    joined.push_str(rest);
    joined
}

/// Returns a text without the space and the comments at its beginning. Compilers take some other
/// characters for space, too.
fn skip_space(mut text: &str) -> &str {
    loop {
        text = text.trim_start_matches(|one: char| one.is_control() || one.is_whitespace() || !one.is_ascii());
        match text.strip_prefix("/*") {
            Some(comment) => text = comment.split_once("*/").map_or("", |(_, behind)| behind),
            None => return text,
        }
    }
}

/// Returns the identifier that a text begins with.
fn identifier(text: &str) -> &str {
    let end = text.find(|one: char| !one.is_ascii_alphanumeric() && one != '_');
    &text[..end.unwrap_or(text.len())]
}

fn is_line_end(one: char) -> bool {
    one == '\n' || one == '\r'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_that_name_files_are_refused_in_every_spelling() {
        for text in [
            "#include \"/etc/passwd\"",
            "int a;\n  # \t include <x>",
            "#\\\ninclude \"x\"",
            "#inc\\  \r\nlude \"x\"",
            "# /* a\n b */ /**/ include \"x\"",
            "%:include \"x\"",
            "??=inc??/\nlude \"x\"",
            "#\u{3000}include \"x\"",
            "#\0include \"x\"",
            "#include_next <x>",
            "#import \"x\"",
            "#embed \"x\"",
            "#if __has_include(\"x\")\n#endif",
            "#pragma GCC dependency \"x\"",
            "_Pragma(\"GCC dependency \\\"x\\\"\")",
        ] {
            let error = check_names_no_file(text).unwrap_err();
            assert!(error.message().contains("a module's source is one file"), "{text}: {error}");
        }
    }

    #[test]
    fn other_directives_pass() {
        for text in [
            "",
            "#",
            "#define f(x) \\\n  x + 1\nint a = '\\\\';\n#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n",
            "int include, embed; /* include */ \"\\n\\\"\"",
            "#if 1 // # /* no end",
            "\\",
        ] {
            check_names_no_file(text).unwrap();
        }
    }
}
