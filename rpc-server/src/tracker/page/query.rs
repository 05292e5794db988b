//! Search, order and grouping of the overview, as the query of its address has them.

use std::cmp::{Ordering, Reverse};
use std::fmt::{self, Write};

use rpc_transports::tracker::{PoolEvent, QueueEntry, ServerSummary};

use crate::tracker::display::{has, holder, wanted};

/// Maximum length of a search, in characters.
const MAX_SEARCH: usize = 200;

/// Order of the servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sort {
    /// By key, then by name.
    #[default]
    Key,
    Name,
    /// Those with most free slots first.
    Free,
    /// Those with most clients first.
    Clients,
    /// Those that were silent for longest first.
    Heard,
}

impl Sort {
    const ALL: [(&str, Self); 5] = [
        ("key", Self::Key),
        ("name", Self::Name),
        ("free", Self::Free),
        ("clients", Self::Clients),
        ("heard", Self::Heard),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, sort)| *sort == self).map_or("", |(name, _)| name)
    }
}

/// Part of the overview that is shown, and its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    /// Words, each of which occurs in what is shown, in lower or upper case.
    pub(super) search: String,
    pub(super) sort: Sort,
    pub(super) is_reversed: bool,
    /// True if the servers of one key are together, under its name.
    pub(super) is_grouped: bool,
}

impl Query {
    /// Reads the query of an address. Unknown parts are ignored.
    pub(super) fn parse(query: &str) -> Self {
        let mut parsed = Self::default();
        for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            let value = decoded(value);
            match name {
                "search" => parsed.search = value.trim().chars().take(MAX_SEARCH).collect(),
                "sort" => {
                    let known = Sort::ALL.iter().find(|(name, _)| *name == value);
                    parsed.sort = known.map(|(_, sort)| *sort).unwrap_or_default();
                }
                "order" => parsed.is_reversed = value == "reversed",
                "group" => parsed.is_grouped = value == "key",
                _ => {}
            }
        }
        parsed
    }

    /// Returns the query that sorts as `sort`, in the other direction if this one does so already.
    pub(super) fn sorted(&self, sort: Sort) -> Self {
        Self { sort, is_reversed: self.sort == sort && !self.is_reversed, ..self.clone() }
    }

    /// Returns the query that groups the servers by key, or the one that does not.
    pub(super) fn grouped(&self, is_grouped: bool) -> Self {
        Self { is_grouped, ..self.clone() }
    }

    /// Returns the servers that are shown, in their order.
    pub(super) fn servers<'a>(&self, servers: &'a [ServerSummary]) -> Vec<&'a ServerSummary> {
        let mut servers: Vec<_> = servers
            .iter()
            .filter(|server| {
                if self.search.is_empty() {
                    return true;
                }
                let clients = server.holders.iter().map(holder).collect::<Vec<_>>().join(" ");
                let addresses = server.address.join(" ");
                self.finds(&[&server.key, &server.name, &server.peer, &addresses, &has(server), &clients])
            })
            .collect();
        // They come by key and name, and the sort keeps the order of equal ones.
        servers.sort_by(|a, b| {
            let order = match self.sort {
                Sort::Key => Ordering::Equal,
                Sort::Name => a.name.cmp(&b.name),
                Sort::Free => Reverse(a.free).cmp(&Reverse(b.free)),
                Sort::Clients => Reverse(a.holders.len()).cmp(&Reverse(b.holders.len())),
                Sort::Heard => Reverse(a.heard_ago_ms).cmp(&Reverse(b.heard_ago_ms)),
            };
            let groups = if self.is_grouped { a.key.cmp(&b.key) } else { Ordering::Equal };
            groups.then(if self.is_reversed { order.reverse() } else { order })
        });
        if self.sort == Sort::Key && self.is_reversed {
            servers.reverse();
        }
        servers
    }

    pub(super) fn finds_request(&self, entry: &QueueEntry) -> bool {
        self.finds(&[&entry.client, &wanted(entry)])
    }

    pub(super) fn finds_event(&self, event: &PoolEvent) -> bool {
        self.finds(&[&event.key, &event.name, &event.why])
    }

    /// Returns true if each word of the search occurs in one of the texts.
    pub(super) fn finds(&self, texts: &[&str]) -> bool {
        if self.search.is_empty() {
            return true;
        }
        let texts: Vec<_> = texts.iter().map(|text| text.to_lowercase()).collect();
        let search = self.search.to_lowercase();
        search.split_whitespace().all(|word| texts.iter().any(|text| text.contains(word)))
    }
}

/// Writes the query as the reference of a link on the overview.
impl fmt::Display for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('/')?;
        let mut separator = '?';
        let mut part = |f: &mut fmt::Formatter<'_>, name: &str, value: &dyn fmt::Display| {
            write!(f, "{separator}{name}={value}")?;
            separator = '&';
            fmt::Result::Ok(())
        };
        if !self.search.is_empty() {
            part(f, "search", &Encoded(&self.search))?;
        }
        if self.sort != Sort::default() {
            part(f, "sort", &self.sort.name())?;
        }
        if self.is_reversed {
            part(f, "order", &"reversed")?;
        }
        if self.is_grouped {
            part(f, "group", &"key")?;
        }
        Ok(())
    }
}

/// Text with percent signs and digits in place of all characters that mean something in an address.
pub(super) struct Encoded<'a>(pub(super) &'a str);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.bytes().try_for_each(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => f.write_char(char::from(byte)),
            byte => write!(f, "%{byte:02X}"),
        })
    }
}

/// Decodes a part of an address, with `+` for a blank as forms write it. What is no encoding stays
/// as it is.
pub(super) fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| byte == b'%').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(encoded) => {
                bytes.push(encoded);
                rest = &after[2..];
            }
            None => {
                bytes.push(if byte == b'+' { b' ' } else { byte });
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_written_as_they_are_read() {
        for text in ["/", "/?search=a%20%26b%C3%A9&sort=free&order=reversed&group=key", "/?sort=heard", "/?group=key"] {
            let query = Query::parse(text.split_once('?').map_or("", |(_, query)| query));
            assert_eq!(query.to_string(), text);
        }
        let query = Query::parse("search=+two+words%2&sort=none&order=&x=y&group");
        assert_eq!(query, Query { search: "two words%2".to_owned(), ..Query::default() });
        assert_eq!(Query::parse(&format!("search={}", "x".repeat(5000))).search.len(), MAX_SEARCH);
    }

    #[test]
    fn each_word_of_a_search_occurs_in_some_text() {
        let query = Query::parse("search=GPU+rack");
        assert!(query.finds(&["4 gpus", "Rack 7"]) && !query.finds(&["4 gpus", "shelf"]));
    }

    #[test]
    fn a_second_click_reverses_the_order() {
        let query = Query::default().sorted(Sort::Free);
        assert_eq!(query.to_string(), "/?sort=free");
        assert_eq!(query.sorted(Sort::Free).to_string(), "/?sort=free&order=reversed");
        assert_eq!(query.sorted(Sort::Free).sorted(Sort::Name).to_string(), "/?sort=name");
    }
}
