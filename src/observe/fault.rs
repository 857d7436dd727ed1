//! Faults on purpose: named points where a test lets this process die or stop, and named
//! deviations from the protocol that the tests must notice.
//!
//! Only with the feature `testing`; otherwise every function here is empty and compiled away.

#[cfg(feature = "testing")]
pub use armed::arm;

/// Does what `KVF_FAULT` (or `arm`) asks for at the point `name`: `name:kill` or `name:stop`
/// sends this process SIGKILL or SIGSTOP, once.
#[inline(always)]
pub fn point(name: &str) {
    #[cfg(feature = "testing")]
    armed::point(name);
    let _ = name;
}

/// Whether this process is to deviate from the protocol: `name:on`.
#[inline(always)]
pub fn deviates(name: &str) -> bool {
    #[cfg(feature = "testing")]
    return armed::deviates(name);
    #[cfg(not(feature = "testing"))]
    {
        let _ = name;
        false
    }
}

#[cfg(feature = "testing")]
mod armed {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use crate::bail;
    use crate::error::Result;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Act {
        Signal(libc::c_int),
        Deviate,
    }

    /// `None`: the environment was not looked at yet.
    static ARMED: Mutex<Option<Vec<(String, Act)>>> = Mutex::new(None);

    /// Arms `name:kill`, `name:stop` or `name:on`, several separated by commas; an empty text disarms.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for any other text.
    pub fn arm(text: &str) -> Result<()> {
        let faults = parse(text)?;
        *armed() = Some(faults);
        Ok(())
    }

    fn parse(text: &str) -> Result<Vec<(String, Act)>> {
        let each = text.split(',').filter(|text| !text.is_empty());
        each.map(parse_one).collect()
    }

    fn parse_one(text: &str) -> Result<(String, Act)> {
        let act = match text.rsplit_once(':') {
            Some((_, "kill")) => Act::Signal(libc::SIGKILL),
            Some((_, "stop")) => Act::Signal(libc::SIGSTOP),
            Some((_, "on")) => Act::Deviate,
            _ => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "fault {text:?}: give NAME:kill, NAME:stop or NAME:on"
            ),
        };
        let name = text.rsplit_once(':').map_or(text, |(name, _)| name);
        Ok((name.to_owned(), act))
    }

    fn armed() -> MutexGuard<'static, Option<Vec<(String, Act)>>> {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        if armed.is_none() {
            let text = std::env::var("KVF_FAULT").unwrap_or_default();
            *armed = Some(parse(&text).unwrap_or_default());
        }
        armed
    }

    pub fn point(name: &str) {
        let mut faults = armed();
        let at = faults.iter().flatten().position(|(armed, _)| armed == name);
        let Some((faults_left, at)) = faults.as_mut().zip(at) else {
            return;
        };
        let Act::Signal(signal) = faults_left[at].1 else {
            return;
        };
        faults_left.remove(at);
        drop(faults);
        // To this thread and not to the process, so that it does not run on until another thread
        // has taken the signal; both signals hit the whole process all the same.
        // SAFETY: signals this process only; both signals need no handler.
        unsafe { libc::raise(signal) };
    }

    pub fn deviates(name: &str) -> bool {
        let faults = armed();
        let mut faults = faults.iter().flatten();
        faults.any(|(armed, act)| armed == name && *act == Act::Deviate)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn only_known_faults_are_armed() {
            assert_eq!(parse("").unwrap(), []);
            let stop = || ("mid_copy".to_owned(), Act::Signal(libc::SIGSTOP));
            assert_eq!(parse("mid_copy:stop").unwrap(), [stop()]);
            let both = [("other".to_owned(), Act::Deviate), stop()];
            assert_eq!(parse("other:on,mid_copy:stop").unwrap(), both);
            assert!(parse("mid_copy").is_err());
            assert!(parse("mid_copy:explode").is_err());
        }
    }
}
