//! Words in pinned memory that engine streams wait for. A word counts up, and a stream waits until
//! it has reached a number; so a word serves the next transfer as soon as it was written.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute, CUstreamWaitValue_flags};

use super::current::Current;
use super::pinned::PinnedRange;
use super::stream::Event;
use super::table::NOT_SUPPORTED;
use super::{CallerStream, Context, Driver, memory};
use crate::bail;
use crate::error::Result;
use crate::observe::fault;

const WORDS: usize = 1024;

/// Pages whose agent has ended while streams were still about to read them.
static PARKED: Mutex<Vec<Arc<Page>>> = Mutex::new(Vec::new());

#[repr(C, align(4096))]
#[derive(Debug)]
struct Memory([AtomicU32; WORDS]);

#[derive(Debug)]
struct Page {
    // Before the memory: fields are dropped in this order.
    pinned: Mutex<Option<PinnedRange>>,
    memory: Box<Memory>,
    state: Mutex<PageState>,
}

#[derive(Debug, Default)]
struct PageState {
    /// Words that no transfer has, and the number that each had last.
    free: Vec<(usize, u32)>,
    /// Behind each wait that a stream has been given.
    waits: Vec<Event>,
}

impl Page {
    fn new() -> Self {
        Self {
            pinned: Mutex::default(),
            memory: Box::new(Memory([const { AtomicU32::new(0) }; WORDS])),
            state: Mutex::new(PageState {
                free: (0..WORDS).map(|word| (word, 0)).collect(),
                waits: Vec::new(),
            }),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, PageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pins it at the first use; the address of its first byte for devices.
    fn device(&self, context: Context) -> Result<u64> {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pinned) = &*pinned {
            return Ok(pinned.device());
        }
        let base = std::ptr::from_ref(&*self.memory).cast_mut().cast::<u8>();
        // SAFETY: the page's own memory, which is freed after the pinned range is dropped.
        let range = unsafe { PinnedRange::new(context, base, size_of::<Memory>() as u64) }?;
        Ok(pinned.insert(range).device())
    }

    /// Whether no stream will read it any more.
    fn is_quiet(&self) -> bool {
        let mut state = self.state();
        state.waits.retain(|event| event.is_done() == Ok(false));
        state.waits.is_empty()
    }
}

/// An agent's words.
#[derive(Debug, Default)]
pub(super) struct Words {
    pages: Mutex<Vec<Arc<Page>>>,
}

impl Words {
    /// Enqueues a wait on the engine's stream for a word that nobody has.
    pub fn stream_wait(&self, stream: CallerStream) -> Result<Word> {
        let context = stream.context(&[])?;
        let driver = Driver::get()?;
        let word = self.take();
        if fault::deviates("cuda_no_stream_wait") {
            return Ok(word);
        }
        let address = word.page.device(context)? + (word.index * 4) as u64;
        // Before the wait: without an event nothing tells when the stream has passed.
        let event = Event::new(driver, context)?;
        {
            let _current = Current::push(driver, context)?;
            wait_value(driver, context, stream, address, word.value)?;
        }
        event.mark(stream.raw()).inspect_err(|_| {
            std::mem::forget(word.page.clone()); // for ever
        })?;
        let mut state = word.page.state();
        if state.waits.len() >= WORDS {
            state.waits.retain(|event| event.is_done() == Ok(false));
        }
        state.waits.push(event);
        drop(state);
        Ok(word)
    }

    fn take(&self) -> Word {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let found = pages.iter().find_map(|page| {
            let (index, last) = page.state().free.pop()?;
            Some((page.clone(), index, last))
        });
        let (page, index, last) = found.unwrap_or_else(|| {
            let page = Arc::new(Page::new());
            page.state().free.retain(|(word, _)| *word != 0);
            pages.push(page.clone());
            (page, 0, 0)
        });
        Word {
            page,
            index,
            value: last.wrapping_add(1),
        }
    }

    /// Frees the pages, those that streams still wait for later.
    pub fn close(&self) {
        let mut parked = PARKED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        parked.append(&mut pages);
        parked.retain(|page| Arc::strong_count(page) > 1 || !page.is_quiet());
    }
}

fn wait_value(
    driver: &'static Driver,
    context: Context,
    stream: CallerStream,
    address: u64,
    value: u32,
) -> Result<()> {
    let table = &driver.table;
    let device = context.device;
    let call = match (table.wait_value, table.wait_value_old) {
        (Some(call), _) => call,
        (None, Some(call)) if has_memory_operations(driver, device)? => call,
        _ => bail!(
            KVF_ERR_UNSUPPORTED,
            "device {device} has no stream memory operations{ADVICE}"
        ),
    };
    let flags = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
    // SAFETY: the stream is live by the caller's contract, the address is a word of a pinned page
    // that stays until the wait is over.
    match unsafe { call(stream.raw(), address, value, flags) } {
        NOT_SUPPORTED => {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "device {device} has no stream memory operations{ADVICE}"
            )
        }
        code => driver.check(code, "cuStreamWaitValue32"),
    }
}

const ADVICE: &str = ": use kvf_transfer_wait() before the work is enqueued";

/// Only asked for the first version of the call; the second one is there on every device.
fn has_memory_operations(driver: &Driver, ordinal: u32) -> Result<bool> {
    let device = memory::device(driver, ordinal)?;
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1 as u32;
    let mut value = 0;
    // SAFETY: writes one integer.
    let code = unsafe { (driver.table.device_attribute)(&mut value, attribute, device) };
    driver.check(code, "cuDeviceGetAttribute")?;
    Ok(value != 0)
}

/// A word that streams wait for. Dropping it lets them go on.
#[derive(Debug)]
pub struct Word {
    page: Arc<Page>,
    index: usize,
    value: u32,
}

impl Drop for Word {
    fn drop(&mut self) {
        self.page.memory.0[self.index].store(self.value, Ordering::SeqCst);
        self.page.state().free.push((self.index, self.value));
    }
}
