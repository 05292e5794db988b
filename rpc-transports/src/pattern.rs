//! Patterns for addresses, as operators write them: text in which `*` stands for anything.

/// Whether `text` matches `pattern`.
pub(crate) fn matches_pattern(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    let Some(mut rest) = rest.strip_suffix(last) else { return false };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::matches_pattern;

    #[test]
    fn a_star_stands_for_anything_and_the_rest_for_itself() {
        for (pattern, text, expected) in [
            ("tcp://10.0.0.*:*", "tcp://10.0.0.5:9090", true),
            ("tcp://10.0.0.*:*", "tcp://10.0.1.5:9090", false),
            ("tcp://a:1", "tcp://a:1", true),
            ("tcp://a:1", "tcp://a:12", false),
            ("*", "", true),
            ("", "x", false),
            ("ab*ba", "aba", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c", false),
        ] {
            assert_eq!(matches_pattern(pattern, text), expected, "{pattern} {text}");
        }
    }
}
