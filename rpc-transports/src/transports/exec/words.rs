//! Words of a command line: splitting and quoting, as a shell does.

/// Splits a command line into words, as a shell does before it expands anything.
///
/// White space separates words. Between single quotes all characters stand for themselves. Between
/// double quotes a backslash takes the meaning from `"`, `\`, `$` and `` ` ``, and stands for
/// itself before any other character. Outside quotes it takes the meaning from any character.
///
/// # Errors
///
/// The problem: a quote is not closed, or nothing follows a backslash.
pub fn split_words(line: &str) -> Result<Vec<String>, &'static str> {
    let mut words = Vec::new();
    let mut characters = line.chars().peekable();
    loop {
        while characters.next_if(|c| c.is_whitespace()).is_some() {}
        if characters.peek().is_none() {
            return Ok(words);
        }
        let mut word = String::new();
        while let Some(character) = characters.next_if(|c| !c.is_whitespace()) {
            match character {
                '\'' => loop {
                    match characters.next().ok_or("a single quote is not closed")? {
                        '\'' => break,
                        other => word.push(other),
                    }
                },
                '"' => loop {
                    match characters.next().ok_or("a double quote is not closed")? {
                        '"' => break,
                        '\\' => match characters.next_if(|c| matches!(c, '"' | '\\' | '$' | '`')) {
                            Some(escaped) => word.push(escaped),
                            None => word.push('\\'),
                        },
                        other => word.push(other),
                    }
                },
                '\\' => word.push(characters.next().ok_or("nothing follows the backslash")?),
                other => word.push(other),
            }
        }
        words.push(word);
    }
}

/// Returns the command line that [`split_words`] splits into `argv`.
pub(super) fn quoted(argv: &[String]) -> String {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '@' | '%' | '+' | '=' | ':' | ',' | '.' | '/' | '-');
    let quote = |word: &String| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    let words: Vec<String> = argv.iter().map(quote).collect();
    words.join(" ")
}
