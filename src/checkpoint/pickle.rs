//! A safe reader of the pickles that torch writes: plain data and tensor descriptions, nothing else (SPEC 1).
//!
//! Nothing is executed. The only callables known are `OrderedDict` and torch's tensor and parameter builders; any
//! other global is an error that names it. Every opcode makes at most one value and every value and member is counted
//! against a limit, so memory and time are bounded whatever the pickle says; depth and size of what is read back out of
//! it are bounded too.

use std::collections::HashMap;
use std::rc::Rc;

/// Number of a value in a [`Pickle`].
pub type Id = usize;

/// A description of a tensor: a strided view of a storage.
#[derive(Debug, Clone)]
pub struct TensorRef {
    /// Storage class, e.g. `FloatStorage`.
    pub kind: Rc<str>,
    /// Entry `data/<key>` of the archive.
    pub key: Rc<str>,
    /// Elements of the storage.
    pub storage_len: u64,
    pub offset: u64,
    pub shape: Vec<u64>,
    pub stride: Vec<u64>,
}

/// One value. Containers hold the numbers of their members, so that shared and later filled ones stay shared.
#[derive(Debug, Clone)]
pub enum Value {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Rc<str>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Tensor(Rc<TensorRef>),
    Storage { kind: Rc<str>, key: Rc<str>, len: u64 },
    Global(Global),
}

/// The callables and classes that a checkpoint may name.
#[derive(Debug, Clone)]
pub enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Rc<str>),
}

/// All values of a pickle and which of them is the result.
#[derive(Debug)]
pub struct Pickle {
    values: Vec<Value>,
    root: Id,
}

/// Values, members, marks and memo slots that a pickle may hold; a model of 600 tensors takes about 40,000.
const MAX_VALUES: usize = 4_000_000;
/// What a tensor description counts as: it is larger than a value.
const TENSOR_COST: usize = 8;

const STORAGES: &[&str] = &[
    "DoubleStorage",
    "FloatStorage",
    "HalfStorage",
    "BFloat16Storage",
    "LongStorage",
    "IntStorage",
    "ShortStorage",
    "CharStorage",
    "ByteStorage",
    "BoolStorage",
];

impl Pickle {
    /// Reads a pickle. Errors: a sentence that says what was found where.
    pub fn read(bytes: &[u8]) -> Result<Pickle, String> {
        Machine {
            bytes,
            at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            room: MAX_VALUES,
        }
        .run()
    }
    /// A value by number.
    pub fn value(&self, id: Id) -> &Value {
        &self.values[id]
    }
    /// The result.
    pub fn root(&self) -> Id {
        self.root
    }
    /// Text of a value.
    pub fn text(&self, id: Id) -> Option<&str> {
        match &self.values[id] {
            Value::Text(s) => Some(s),
            _ => None,
        }
    }
    /// Member of a dictionary; the last of equal keys counts.
    pub fn get(&self, dict: Id, key: &str) -> Option<Id> {
        match &self.values[dict] {
            Value::Dict(items) => items.iter().rev().find(|(k, _)| self.text(*k) == Some(key)).map(|(_, v)| *v),
            _ => None,
        }
    }
    /// Items of a dictionary.
    pub fn items(&self, dict: Id) -> &[(Id, Id)] {
        match &self.values[dict] {
            Value::Dict(items) => items,
            _ => &[],
        }
    }

    /// A value as JSON. Errors for tensors and other things that JSON has not, and for trees that are too large.
    pub fn json(&self, id: Id) -> Result<serde_json::Value, String> {
        // Shared members make a small pickle stand for a huge tree: count what is written out.
        let mut budget = 1_000_000;
        self.json_part(id, 64, &mut budget)
    }
    /// `budget` is what may still be written: a value counts as one, and so do 16 bytes of text.
    fn json_part(&self, id: Id, depth: usize, budget: &mut usize) -> Result<serde_json::Value, String> {
        use serde_json::Value as Json;
        fn spend(budget: &mut usize, text: &str) -> Result<(), String> {
            *budget = budget.checked_sub(1 + text.len() / 16).ok_or("it is too large to be a configuration")?;
            Ok(())
        }
        if depth == 0 {
            return Err("it is nested too deeply (or holds itself)".into());
        }
        spend(budget, self.text(id).unwrap_or_default())?;
        Ok(match &self.values[id] {
            Value::None => Json::Null,
            Value::Bool(b) => Json::Bool(*b),
            Value::Int(i) => match (i64::try_from(*i), u64::try_from(*i)) {
                (Ok(i), _) => Json::from(i),
                (_, Ok(i)) => Json::from(i),
                _ => return Err(format!("the whole number {i} is too large")),
            },
            // JSON has no NaN and no infinity, and neither has an option of a model.
            Value::Float(x) if !x.is_finite() => return Err(format!("the number {x} is not finite")),
            Value::Float(x) => Json::from(*x),
            Value::Text(s) => Json::String(s.to_string()),
            Value::List(items) => {
                Json::Array(items.iter().map(|&i| self.json_part(i, depth - 1, budget)).collect::<Result<_, _>>()?)
            }
            Value::Dict(items) => {
                let mut map = serde_json::Map::new();
                for &(key, value) in items {
                    let key = match &self.values[key] {
                        Value::Text(s) => s.to_string(),
                        Value::Int(i) => i.to_string(),
                        _ => return Err("a dictionary has a key that is no text".into()),
                    };
                    spend(budget, &key)?;
                    map.insert(key, self.json_part(value, depth - 1, budget)?);
                }
                Json::Object(map)
            }
            Value::Tensor(_) | Value::Storage { .. } | Value::Global(_) => {
                return Err("it holds a tensor or a class where plain data is expected".into());
            }
        })
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    /// How many values and members may still be made.
    room: usize,
}

impl Machine<'_> {
    fn run(mut self) -> Result<Pickle, String> {
        loop {
            let op = self.byte()?;
            match op {
                0x80 => match self.byte()? {
                    2..=5 => {}
                    other => return Err(format!("pickle protocol {other} is not known (2 is expected)")),
                },
                b'.' => {
                    let root = self.pop()?;
                    return Ok(Pickle { values: self.values, root });
                }
                b'}' => self.push(Value::Dict(Vec::new()))?,
                b']' => self.push(Value::List(Vec::new()))?,
                b')' => self.push(Value::List(Vec::new()))?,
                b'N' => self.push(Value::None)?,
                0x88 => self.push(Value::Bool(true))?,
                0x89 => self.push(Value::Bool(false))?,
                b'J' => {
                    let x = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(x.into()))?;
                }
                b'K' => {
                    let x = self.byte()?;
                    self.push(Value::Int(x.into()))?;
                }
                b'M' => {
                    let x = u16::from_le_bytes(self.array()?);
                    self.push(Value::Int(x.into()))?;
                }
                0x8a => self.long()?,
                b'G' => {
                    let x = f64::from_be_bytes(self.array()?);
                    self.push(Value::Float(x))?;
                }
                b'X' => {
                    let length = u32::from_le_bytes(self.array()?) as usize;
                    self.text(length)?;
                }
                0x8c => {
                    let length = self.byte()?.into();
                    self.text(length)?;
                }
                b'q' => {
                    let slot = self.byte()?.into();
                    self.remember(slot)?;
                }
                b'r' => {
                    let slot = u32::from_le_bytes(self.array()?);
                    self.remember(slot)?;
                }
                b'h' => {
                    let slot = self.byte()?.into();
                    self.recall(slot)?;
                }
                b'j' => {
                    let slot = u32::from_le_bytes(self.array()?);
                    self.recall(slot)?;
                }
                b'(' => {
                    self.spend(1)?;
                    self.marks.push(self.stack.len());
                }
                b't' => {
                    let items = self.pop_mark()?;
                    self.push(Value::List(items))?;
                }
                0x85..=0x87 => {
                    let count = usize::from(op - 0x84);
                    let first = self.stack.len().checked_sub(count).ok_or("an empty pickle stack")?;
                    let items = self.stack.split_off(first);
                    self.push(Value::List(items))?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.extend_list(&[item])?;
                }
                b'e' => {
                    let items = self.pop_mark()?;
                    self.extend_list(&items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.extend_dict(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_mark()?;
                    self.extend_dict(&items)?;
                }
                b'c' => self.global()?,
                b'Q' => self.storage()?,
                b'R' => self.reduce()?,
                // Attributes of an OrderedDict (torch puts `_metadata` there): nothing that energies depend on.
                b'b' => {
                    self.pop()?;
                    let target = self.top()?;
                    if !matches!(self.values[target], Value::Dict(_)) {
                        return Err("the pickle sets attributes of something that is no dictionary".into());
                    }
                }
                other => return Err(format!("pickle opcode {other:#04x} at byte {} is not allowed", self.at - 1)),
            }
        }
    }

    fn take(&mut self, n: usize) -> Result<&[u8], String> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end
            .ok_or_else(|| format!("the pickle ends early, at byte {}; was the copy interrupted?", self.bytes.len()))?;
        let out = &self.bytes[self.at..end];
        self.at = end;
        Ok(out)
    }
    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N)?.try_into().map_err(|_| "the pickle ends early; was the copy interrupted?".to_string())
    }
    fn spend(&mut self, count: usize) -> Result<(), String> {
        let room = self.room.checked_sub(count);
        self.room = room.ok_or_else(|| format!("the pickle describes more than {MAX_VALUES} values"))?;
        Ok(())
    }
    fn push(&mut self, value: Value) -> Result<(), String> {
        self.spend(1)?;
        self.stack.push(self.values.len());
        self.values.push(value);
        Ok(())
    }
    fn top(&self) -> Result<Id, String> {
        self.stack.last().copied().ok_or_else(|| "an empty pickle stack".to_string())
    }
    fn pop(&mut self) -> Result<Id, String> {
        if self.marks.last() == Some(&self.stack.len()) {
            return Err("the pickle takes more than it has put on its stack".into());
        }
        self.stack.pop().ok_or_else(|| "an empty pickle stack".to_string())
    }
    fn pop_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().filter(|&m| m <= self.stack.len()).ok_or("a pickle mark is missing")?;
        Ok(self.stack.split_off(mark))
    }
    fn remember(&mut self, slot: u32) -> Result<(), String> {
        self.spend(1)?;
        let id = self.top()?;
        self.memo.insert(slot, id);
        Ok(())
    }
    fn recall(&mut self, slot: u32) -> Result<(), String> {
        let id = *self.memo.get(&slot).ok_or_else(|| format!("pickle memo {slot} was never set"))?;
        self.spend(1)?;
        self.stack.push(id);
        Ok(())
    }
    fn text(&mut self, length: usize) -> Result<(), String> {
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| "a text in the pickle is not UTF-8")?;
        let text = Rc::from(text);
        self.push(Value::Text(text))
    }
    fn long(&mut self) -> Result<(), String> {
        let length = usize::from(self.byte()?);
        if length > 16 {
            return Err(format!("a whole number of {length} bytes in the pickle"));
        }
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut buffer = [if negative { 0xff } else { 0 }; 16];
        buffer[..length].copy_from_slice(bytes);
        self.push(Value::Int(i128::from_le_bytes(buffer)))
    }
    fn extend_list(&mut self, items: &[Id]) -> Result<(), String> {
        let target = self.top()?;
        match &mut self.values[target] {
            Value::List(list) => list.extend_from_slice(items),
            _ => return Err("the pickle appends to something that is no list".into()),
        }
        Ok(())
    }
    fn extend_dict(&mut self, items: &[Id]) -> Result<(), String> {
        let target = self.top()?;
        match &mut self.values[target] {
            Value::Dict(dict) if items.len().is_multiple_of(2) => {
                dict.extend(items.chunks_exact(2).map(|p| (p[0], p[1])))
            }
            _ => return Err("the pickle sets items of something that is no dictionary".into()),
        }
        Ok(())
    }
    fn line(&mut self) -> Result<String, String> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().take(256).position(|&b| b == b'\n').ok_or("a global's name does not end")?;
        let line = String::from_utf8_lossy(&rest[..end]).into_owned();
        self.at += end + 1;
        Ok(line)
    }
    fn global(&mut self) -> Result<(), String> {
        let (module, name) = (self.line()?, self.line()?);
        let global = match (module.as_str(), name.as_str()) {
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
            ("torch", name) if STORAGES.contains(&name) => Global::Storage(Rc::from(name)),
            _ => {
                return Err(format!(
                    "the checkpoint names {module}.{name}, which is neither plain data nor a tensor: nothing in a \
                     checkpoint is executed, so it cannot be read; save it again with weights and configuration only"
                ));
            }
        };
        self.push(Value::Global(global))
    }
    /// A persistent id: ("storage", class, key, device, elements).
    fn storage(&mut self) -> Result<(), String> {
        let id = self.pop()?;
        let found = match &self.values[id] {
            Value::List(parts) => match parts[..] {
                [tag, class, key, _, len] if self.is_text(tag, "storage") => {
                    match (&self.values[class], &self.values[key], &self.values[len]) {
                        (Value::Global(Global::Storage(kind)), Value::Text(key), Value::Int(len)) => {
                            u64::try_from(*len).ok().map(|len| Value::Storage {
                                kind: kind.clone(),
                                key: key.clone(),
                                len,
                            })
                        }
                        _ => None,
                    }
                }
                _ => None,
            },
            _ => None,
        };
        self.push(found.ok_or("a storage of the pickle is not described as torch does it")?)
    }
    fn is_text(&self, id: Id, text: &str) -> bool {
        matches!(&self.values[id], Value::Text(s) if &**s == text)
    }
    fn reduce(&mut self) -> Result<(), String> {
        let arguments = self.pop()?;
        let callable = self.pop()?;
        let (Value::Global(global), Value::List(arguments)) = (&self.values[callable], &self.values[arguments]) else {
            return Err("the pickle calls something that is no function".into());
        };
        let made = match (global, &arguments[..]) {
            (Global::OrderedDict, []) => Value::Dict(Vec::new()),
            (Global::RebuildParameter, [data, ..]) => {
                let data = *data;
                self.stack.push(data);
                return Ok(());
            }
            (Global::RebuildTensor, [storage, offset, shape, stride, ..]) => {
                self.tensor(*storage, *offset, *shape, *stride).ok_or("a tensor is not described as torch does it")?
            }
            _ => return Err("the pickle calls a function with arguments that torch does not give it".into()),
        };
        if matches!(made, Value::Tensor(_)) {
            self.spend(TENSOR_COST)?;
        }
        self.push(made)
    }
    fn tensor(&self, storage: Id, offset: Id, shape: Id, stride: Id) -> Option<Value> {
        let Value::Storage { kind, key, len } = &self.values[storage] else { return None };
        let number = |id: Id| match self.values[id] {
            Value::Int(x) => u64::try_from(x).ok(),
            _ => None,
        };
        let numbers = |id: Id| match &self.values[id] {
            Value::List(items) if items.len() <= 16 => items.iter().map(|&i| number(i)).collect::<Option<Vec<u64>>>(),
            _ => None,
        };
        let (shape, stride) = (numbers(shape)?, numbers(stride)?);
        (shape.len() == stride.len()).then_some(())?;
        let tensor = TensorRef {
            kind: kind.clone(),
            key: key.clone(),
            storage_len: *len,
            offset: number(offset)?,
            shape,
            stride,
        };
        Some(Value::Tensor(Rc::new(tensor)))
    }
}
