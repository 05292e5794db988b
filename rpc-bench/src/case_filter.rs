//! Selection of cases by name, with `*` for any text.

use rpc_server::cli::Failure;

/// Returns the names among `all` that match one of `patterns`, in the order of `all`; all of them
/// without a pattern. `hint` is added to the error for a pattern that matches no name.
pub(crate) fn select<'a>(
    patterns: &[String],
    all: impl Iterator<Item = &'a str> + Clone,
    hint: impl Fn(&str) -> &'static str,
) -> Result<Vec<&'a str>, Failure> {
    for pattern in patterns {
        if !all.clone().any(|name| matches(pattern, name)) {
            let (hint, names) = (hint(pattern), all.collect::<Vec<_>>().join(", "));
            return Err(Failure::Usage(format!("there is no case '{pattern}'{hint}; there are {names}")));
        }
    }
    let is_selected = |name: &str| patterns.is_empty() || patterns.iter().any(|pattern| matches(pattern, name));
    Ok(all.filter(|name| is_selected(name)).collect())
}

/// Returns true if `name` matches `pattern`, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((prefix, rest)) => name
            .strip_prefix(prefix)
            .is_some_and(|name| (0..=name.len()).any(|at| name.is_char_boundary(at) && matches(rest, &name[at..]))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_names() {
        assert!(matches("copy_*_64MiB", "copy_to_64MiB") && !matches("copy_*_64MiB", "copy_to_64MiB_1hop"));
        assert!(matches("*", "call") && matches("call*", "call") && !matches("call", "call_1hop"));
    }

    #[test]
    fn pattern_without_a_match_is_refused_with_the_hint() {
        let all = ["call", "connect"].into_iter();
        assert_eq!(select(&[], all.clone(), |_| "").unwrap(), ["call", "connect"]);
        assert_eq!(select(&["con*".to_owned()], all.clone(), |_| "").unwrap(), ["connect"]);
        let error = select(&["call_1hop".to_owned()], all, |_| "; it needs --hop").unwrap_err();
        assert_eq!(error.to_string(), "there is no case 'call_1hop'; it needs --hop; there are call, connect");
    }
}
