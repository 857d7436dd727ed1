//! The agent's log: off unless the caller gave a sink.

use std::fmt;

/// Receives log lines: level (1 error, 2 warning, 3 info, 4 debug) and text. Called on kvferry's
/// threads, one line at a time; must not call kvferry.
pub type LogSink = Box<dyn Fn(u32, &str) + Send + Sync>;

/// A sink and the largest level it wants.
#[derive(Default)]
pub(super) struct Log {
    level: u32,
    sink: Option<LogSink>,
}

impl Log {
    pub fn new(sink: Option<(u32, LogSink)>) -> Self {
        match sink {
            Some((level, sink)) => Self {
                level,
                sink: Some(sink),
            },
            None => Self::default(),
        }
    }

    fn write(&self, level: u32, text: fmt::Arguments<'_>) {
        if let Some(sink) = &self.sink
            && level <= self.level
        {
            // The sink may run on a caller's thread too; there the mark forbids calls from it.
            let _mark = crate::observe::marks::InCallback::enter();
            // A line stays one, whatever a peer calls itself or says.
            sink(level, &text.to_string().replace(char::is_control, " "));
        }
    }

    pub fn warn(&self, text: fmt::Arguments<'_>) {
        self.write(2, text);
    }

    pub fn info(&self, text: fmt::Arguments<'_>) {
        self.write(3, text);
    }

    pub fn debug(&self, text: fmt::Arguments<'_>) {
        self.write(4, text);
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log")
            .field("level", &self.level)
            .finish_non_exhaustive()
    }
}
