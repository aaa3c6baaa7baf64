//! Extended XYZ: frames of a number of atoms, a comment of `key=value` pairs, and one line an atom.
//!
//! Read are `Lattice` (nine numbers, row vectors), `pbc` and `Properties` with the columns `species` and `pos`; other
//! keys and columns are skipped. A frame without `Properties` begins with a symbol and three coordinates a line.

use crate::Error;
use crate::math::Matrix3;
use std::path::Path;
use std::str::FromStr;

/// One structure of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Line of the file, from 1, on which the frame begins.
    pub line: usize,
    /// Element symbol of each atom.
    pub elements: Vec<String>,
    /// Å.
    pub positions: Vec<[f64; 3]>,
    /// Cell vectors as rows, Å.
    pub cell: Option<Matrix3>,
    /// Which cell vectors repeat.
    pub pbc: [bool; 3],
}

/// All frames of a file. Errors: `Io`, and `Format` that says on which line what was expected and found.
pub fn read(path: &Path) -> crate::Result<Vec<Frame>> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    let text = String::from_utf8(bytes).map_err(|_| Error::format(path, "is not text: expected extended XYZ"))?;
    parse(&text).map_err(|(line, reason)| Error::format(path, format!("line {line}: {reason}")))
}

/// A line number from 1, and what is wrong there.
type Wrong = (usize, String);

fn parse(text: &str) -> Result<Vec<Frame>, Wrong> {
    let lines: Vec<&str> = text.lines().collect();
    let mut frames = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        if lines[at].trim().is_empty() {
            at += 1;
            continue;
        }
        let frame = frame(&lines, at)?;
        at += 2 + frame.elements.len();
        frames.push(frame);
    }
    if frames.is_empty() {
        return Err((1, "the file is empty: expected the number of atoms of a frame".into()));
    }
    Ok(frames)
}

/// The frame that begins at `lines[first]`.
fn frame(lines: &[&str], first: usize) -> Result<Frame, Wrong> {
    let number = first + 1;
    let count = lines[first].trim();
    let count: usize = count
        .parse()
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| (number, format!("expected the number of atoms of a frame, 1 or more, found '{count}'")))?;
    let left = lines.len() - first - 1;
    if left == 0 || left - 1 < count {
        let found = left.saturating_sub(1);
        return Err((number, format!("the frame has {count} atoms, but the file ends after {found} of their lines")));
    }
    let comment = Comment::parse(lines[first + 1]).map_err(|e| (number + 1, e))?;
    let mut frame = Frame {
        line: number,
        elements: Vec::with_capacity(count),
        positions: Vec::with_capacity(count),
        cell: comment.cell,
        pbc: comment.pbc,
    };
    for (k, line) in lines[first + 2..first + 2 + count].iter().enumerate() {
        let (element, position) = comment.columns.atom(line).map_err(|e| (number + 2 + k, e))?;
        frame.elements.push(element);
        frame.positions.push(position);
    }
    Ok(frame)
}

/// What the comment line says.
struct Comment {
    cell: Option<Matrix3>,
    pbc: [bool; 3],
    columns: Columns,
}

impl Comment {
    fn parse(line: &str) -> Result<Self, String> {
        let (mut cell, mut pbc, mut columns) = (None, None, Columns::PLAIN);
        for (key, value) in pairs(line)? {
            match key.to_ascii_lowercase().as_str() {
                "lattice" => cell = Some(lattice(&value)?),
                "pbc" => pbc = Some(periodicity(&value)?),
                "properties" => columns = Columns::parse(&value)?,
                _ => {}
            }
        }
        let pbc = pbc.unwrap_or([cell.is_some(); 3]);
        if cell.is_none() && pbc.contains(&true) {
            return Err("pbc says that the structure repeats, but there is no Lattice: give its nine numbers".into());
        }
        Ok(Comment { cell, pbc, columns })
    }
}

/// `key=value` pairs; values may stand in double or single quotes or braces. Words without `=` have no value and are
/// left out.
fn pairs(line: &str) -> Result<Vec<(String, String)>, String> {
    let mut out = Vec::new();
    let mut rest = line.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c.is_whitespace()).unwrap_or(rest.len());
        let key = &rest[..end];
        let Some(after) = rest[end..].strip_prefix('=') else {
            rest = rest[end..].trim_start();
            continue;
        };
        let closing = after.chars().next().and_then(|c| match c {
            '"' | '\'' => Some(c),
            '{' => Some('}'),
            _ => None,
        });
        let (value, next) = match closing {
            Some(c) => after[1..].split_once(c).ok_or_else(|| format!("the value of {key} has no closing {c}"))?,
            None => after.split_at(after.find(char::is_whitespace).unwrap_or(after.len())),
        };
        out.push((key.to_string(), value.to_string()));
        rest = next.trim_start();
    }
    Ok(out)
}

fn lattice(value: &str) -> Result<Matrix3, String> {
    let numbers: Vec<f64> = value.split_whitespace().map(|word| number("Lattice", word)).collect::<Result<_, _>>()?;
    match numbers[..] {
        [a, b, c, d, e, f, g, h, i] => Ok([[a, b, c], [d, e, f], [g, h, i]]),
        _ => Err(format!("Lattice needs nine numbers (three row vectors, Å), found {}", numbers.len())),
    }
}

fn periodicity(value: &str) -> Result<[bool; 3], String> {
    let flag = |word: &str| match word.to_ascii_lowercase().as_str() {
        "t" | "true" | "1" => Ok(true),
        "f" | "false" | "0" => Ok(false),
        _ => Err(format!("pbc: expected T or F for each of the three cell vectors, found '{word}'")),
    };
    let flags: Vec<bool> = value.split_whitespace().map(flag).collect::<Result<_, _>>()?;
    match flags[..] {
        [all] => Ok([all; 3]),
        [a, b, c] => Ok([a, b, c]),
        _ => Err(format!("pbc: expected one flag or three, found {}", flags.len())),
    }
}

/// A finite number; `what` says in a message what it belongs to.
fn number(what: &str, word: &str) -> Result<f64, String> {
    f64::from_str(word)
        .ok()
        .filter(|x| x.is_finite())
        .ok_or_else(|| format!("{what}: expected a number, found '{word}'"))
}

/// Where an atom's line holds its symbol and coordinates.
struct Columns {
    species: usize,
    position: usize,
    /// Columns of a line; `None`: any number that is enough.
    count: Option<usize>,
}

impl Columns {
    /// Without `Properties`: symbol, x, y, z.
    const PLAIN: Columns = Columns { species: 0, position: 1, count: None };

    /// `name:kind:columns` triples.
    fn parse(properties: &str) -> Result<Self, String> {
        let fields: Vec<&str> = properties.split(':').collect();
        if !fields.len().is_multiple_of(3) {
            return Err(format!("Properties: expected name:type:columns triples, found '{properties}'"));
        }
        let (mut species, mut position, mut count) = (None, None, 0usize);
        for triple in fields.chunks_exact(3) {
            let wide: usize = triple[2].parse().ok().filter(|n| (1..=10_000).contains(n)).ok_or_else(|| {
                format!("Properties: expected a number of columns for {}, found '{}'", triple[0], triple[2])
            })?;
            match (triple[0], triple[1], wide) {
                ("species", "S", 1) => species = Some(count),
                ("pos", "R", 3) => position = Some(count),
                ("species", ..) | ("pos", ..) => {
                    return Err(format!("Properties: expected species:S:1 and pos:R:3, found '{}'", triple.join(":")));
                }
                _ => {}
            }
            count += wide;
        }
        match (species, position) {
            (Some(species), Some(position)) => Ok(Columns { species, position, count: Some(count) }),
            _ => Err(format!("Properties needs species:S:1 and pos:R:3, found '{properties}'")),
        }
    }

    fn atom(&self, line: &str) -> Result<(String, [f64; 3]), String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let enough = (self.position + 3).max(self.species + 1);
        if words.len() < enough || self.count.is_some_and(|count| count != words.len()) {
            let expected = self.count.unwrap_or(enough);
            return Err(format!("expected the {expected} columns of an atom, found {} in '{line}'", words.len()));
        }
        let mut position = [0.0; 3];
        for (x, word) in position.iter_mut().zip(&words[self.position..]) {
            *x = number("coordinate", word)?;
        }
        Ok((words[self.species].to_string(), position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_frames_with_and_without_a_cell() {
        let text = "2\nLattice=\"4 0 0 0.5 4 0 0 0 5e0\" energy=-1.5 Properties=id:I:1:species:S:1:pos:R:3:forces:R:3 pbc='T T F'\n\
                    1 O 0 0.25 -1 9 9 9\n2 H 1 2 3 9 9 9\n\n1\n\nCu 0.1 0.2 0.3 extra\n";
        let frames = parse(text).unwrap();
        assert_eq!(frames.len(), 2);
        assert_eq!(frames[0].line, 1);
        assert_eq!(frames[0].elements, ["O", "H"]);
        assert_eq!(frames[0].positions, [[0.0, 0.25, -1.0], [1.0, 2.0, 3.0]]);
        assert_eq!(frames[0].cell, Some([[4.0, 0.0, 0.0], [0.5, 4.0, 0.0], [0.0, 0.0, 5.0]]));
        assert_eq!(frames[0].pbc, [true, true, false]);
        let molecule = Frame {
            line: 6,
            elements: vec!["Cu".into()],
            positions: vec![[0.1, 0.2, 0.3]],
            cell: None,
            pbc: [false; 3],
        };
        assert_eq!(frames[1], molecule);
    }

    #[test]
    fn a_lattice_repeats_unless_told_otherwise() {
        let parse = |comment: &str| Comment::parse(comment).map(|c| c.pbc);
        let lattice = "Lattice=\"1 0 0 0 1 0 0 0 1\"";
        assert_eq!(parse(lattice), Ok([true; 3]));
        assert_eq!(parse(&format!("{lattice} pbc=F")), Ok([false; 3]));
        assert_eq!(parse(&format!("{lattice} pbc={{0 1 0}} note")), Ok([false, true, false]));
        assert_eq!(parse(""), Ok([false; 3]));
    }

    #[test]
    fn errors_name_the_line_and_what_was_found() {
        let cases = [
            ("", 1, "empty"),
            ("two\n", 1, "found 'two'"),
            ("0\n\n", 1, "found '0'"),
            ("2\n\nO 0 0 0\n", 1, "after 1 of their lines"),
            ("99999999999999\n\n", 1, "after 0 of their lines"),
            ("1", 1, "after 0 of their lines"),
            ("1\nLattice=\"1 2 3\"\nO 0 0 0\n", 2, "found 3"),
            ("1\nLattice=\"1 2 3\nO 0 0 0\n", 2, "no closing \""),
            ("1\nLattice=\"1 0 0 0 x 0 0 0 1\"\nO 0 0 0\n", 2, "found 'x'"),
            ("1\npbc=\"T T T\"\nO 0 0 0\n", 2, "no Lattice"),
            ("1\npbc=\"T maybe T\"\nO 0 0 0\n", 2, "found 'maybe'"),
            ("1\npbc=\"T T\"\nO 0 0 0\n", 2, "found 2"),
            ("1\nProperties=species:S:1\nO\n", 2, "pos:R:3"),
            ("1\nProperties=species:S:1:pos:R:2\nO 0 0\n", 2, "found 'pos:R:2'"),
            ("1\nProperties=species:S:1:pos\nO 0 0\n", 2, "triples"),
            ("1\nProperties=species:S:1:pos:R:3\nO 0 0 0 1\n", 3, "expected the 4 columns of an atom, found 5"),
            ("2\n\nO 0 0 0\nO 0 0\n", 4, "found 3 in 'O 0 0'"),
            ("1\n\nO 0 nan 0\n", 3, "found 'nan'"),
            ("1\n\nO 0 0 0\nleft over\n", 4, "found 'left over'"),
        ];
        for (text, line, reason) in cases {
            let (found_line, found) = parse(text).unwrap_err();
            assert_eq!(found_line, line, "{text:?}: {found}");
            assert!(found.contains(reason), "{text:?}: {found}");
        }
    }
}
