//! Records as lines of text, for tables and log pipelines.

use serde::Serialize;

use super::api::{Record, Side};
use super::port::Port;
use super::room::Transceiver;
use crate::error::{Error, Result, Status};

/// How records are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordFormat {
    /// A JSON object a line.
    JsonLines,
    /// Comma-separated, the names in the first line.
    Csv,
}

/// One line. Times are in ns since the request's call; 0 = not yet.
#[derive(Serialize)]
struct Line<'a> {
    request: u64,
    attempt: u32,
    side: &'static str,
    outcome: String,
    cause: String,
    rank: u32,
    /// Since the transceiver was made.
    queued_ns: u64,
    first_byte_ns: u64,
    last_byte_ns: u64,
    attested_ns: u64,
    decided_ns: u64,
    safe_ns: u64,
    bytes: u64,
    /// From the first byte to the last; 0 = nothing was moved.
    gb_per_s: f64,
    transport: &'a str,
}

impl<'a> From<&'a Record> for Line<'a> {
    fn from(record: &'a Record) -> Self {
        Self {
            request: record.key.request,
            attempt: record.key.attempt,
            side: record.side.name(),
            outcome: format!("{:?}", record.outcome),
            cause: format!("{:?}", record.cause),
            rank: record.rank,
            queued_ns: record.queued_ns,
            first_byte_ns: record.first_byte_ns,
            last_byte_ns: record.last_byte_ns,
            attested_ns: record.ended_ns,
            decided_ns: record.decided_ns,
            safe_ns: record.safe_ns,
            bytes: record.bytes,
            gb_per_s: record.gb_per_s(),
            transport: record.transport,
        }
    }
}

impl Record {
    /// Bytes per nanosecond between the first and the last byte; 0 if nothing was moved, and on the
    /// context side, which only hears of its readers.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        if self.side == Side::Context {
            return 0.0;
        }
        match self.last_byte_ns.saturating_sub(self.first_byte_ns) {
            0 => 0.0,
            ns => self.bytes as f64 / ns as f64,
        }
    }
}

impl<P: Port> Transceiver<P> {
    /// The ended requests whose records are kept, oldest first; context requests, then receives.
    pub fn records(&self) -> Vec<Record> {
        let sides = Side::ALL.iter();
        sides.flat_map(|side| self.kept_records(*side)).collect()
    }

    /// The same as text.
    ///
    /// # Errors
    /// `KVF_ERR_INTERNAL`: they cannot be written (a bug).
    pub fn records_text(&self, format: RecordFormat) -> Result<String> {
        let records = self.records();
        let lines = records.iter().map(Line::from);
        let broken = |e: &dyn std::fmt::Display| {
            Error::new(Status::KVF_ERR_INTERNAL, format!("records: {e}"))
        };
        match format {
            RecordFormat::JsonLines => {
                let mut text = String::new();
                for line in lines {
                    text += &serde_json::to_string(&line).map_err(|e| broken(&e))?;
                    text.push('\n');
                }
                Ok(text)
            }
            RecordFormat::Csv => {
                let mut writer = csv::Writer::from_writer(Vec::new());
                for line in lines {
                    writer.serialize(line).map_err(|e| broken(&e))?;
                }
                let bytes = writer.into_inner().map_err(|e| broken(&e))?;
                String::from_utf8(bytes).map_err(|e| broken(&e))
            }
        }
    }
}
