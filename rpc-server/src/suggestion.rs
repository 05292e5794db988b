//! Suggestions for misspelt names: of keys in configuration files, and of named servers.

/// Least similarity of a suggestion to the given name, from 0 to 1: that of clap for flags.
const LEAST_SIMILARITY: f64 = 0.7;

/// Returns the candidate that is most similar to `name`, if one is similar enough.
pub(crate) fn similar_name<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let similarity = |candidate: &str| strsim::jaro_winkler(name, candidate);
    let similar = candidates.into_iter().map(|candidate| (similarity(candidate), candidate));
    let best = similar.max_by(|(left, _), (right, _)| left.total_cmp(right));
    best.filter(|(similarity, _)| *similarity > LEAST_SIMILARITY).map(|(_, candidate)| candidate)
}

/// Returns the key that was probably meant by one that a TOML file may not have. Serde names both
/// in the message of its error: "unknown field `a`, expected one of `b`, `c`".
pub(crate) fn likely_key(error: &toml::de::Error) -> Option<&str> {
    let (unknown, expected) = error.message().strip_prefix("unknown field `")?.split_once("`, expected ")?;
    similar_name(unknown, expected.split('`').skip(1).step_by(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_similar_name_is_suggested_and_a_different_one_is_not() {
        let names = ["max-message", "max-memory", "listen"];
        assert_eq!(similar_name("max-mesage", names), Some("max-message"));
        assert_eq!(similar_name("lisen", names), Some("listen"));
        assert_eq!(similar_name("quota", names), None);
        assert_eq!(similar_name("quota", []), None);
    }
}
