//! Whether an agent can be reached: since when not, how often that was tried in vain, and why.
//!
//! A link that comes up proves little: who is out of file descriptors accepts and closes. So the
//! time of trying runs on until the way to the agent's memory is made, or a link has stayed up for
//! a heartbeat; and pauses grow as long as links break sooner.

use std::time::Duration;

use super::api::Timeouts;
use crate::session::Now;

/// The pause after the first failure is twice this; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// How often it doubles at most.
const DOUBLINGS: u32 = 7;

#[derive(Debug, Default)]
pub(super) struct Reach {
    /// Since when there is no way that has proven itself; `None` = there is one, or nobody tries.
    since: Option<Now>,
    /// Attempts that failed and links that broke soon, in a row.
    failed: u32,
    cause: String,
    up_at: Now,
    met: bool,
}

impl Reach {
    /// An attempt begins.
    pub fn trying(&mut self, now: Now) {
        self.since.get_or_insert(now);
    }

    /// An attempt failed; the pause before the next one.
    pub fn failed(&mut self, now: Now, cause: &str) -> Duration {
        self.trying(now);
        self.failed += 1;
        cause.clone_into(&mut self.cause);
        FIRST_PAUSE * 2u32.pow(self.failed.min(DOUBLINGS))
    }

    /// A link is up.
    pub fn up(&mut self, now: Now) {
        self.up_at = now;
        self.met = true;
    }

    /// The link that was up makes room for another one.
    pub fn replaced(&mut self, now: Now, times: &Timeouts) {
        if now.saturating_sub(self.up_at) >= times.heartbeat {
            self.since = None;
            self.failed = 0;
        }
    }

    /// A link has been up before: the process behind it was the agent's.
    pub fn met(&self) -> bool {
        self.met
    }

    /// The way is made, over the link that is up. Pauses stay long until a link has stayed.
    pub fn made(&mut self) {
        self.since = None;
        self.cause.clear();
    }

    /// The link that was up has broken; the pause before the next attempt. The last sign of life
    /// counts, but not so that no time is left for an attempt: this process may have been stopped.
    pub fn broke(&mut self, now: Now, heard: Now, times: &Timeouts, cause: &str) -> Duration {
        let stayed = now.saturating_sub(self.up_at) >= times.heartbeat;
        if stayed {
            self.since = None;
            self.failed = 0;
        }
        self.since.get_or_insert(heard.max(latest(now, times)));
        if stayed {
            cause.clone_into(&mut self.cause);
            return Duration::ZERO;
        }
        self.failed(now, cause)
    }

    /// When it is given up.
    pub fn ends_at(&self, times: &Timeouts) -> Option<Now> {
        self.since.map(|since| since + times.peer_silence)
    }

    /// This process was stopped itself: one heartbeat's time more.
    pub fn extend(&mut self, now: Now, times: &Timeouts) {
        self.since = self.since.map(|since| since.max(latest(now, times)));
    }

    /// Why it cannot be reached, for people.
    pub fn describe(&self, now: Now) -> String {
        let cause = match self.cause.as_str() {
            "" => "no answer",
            cause => cause,
        };
        let tried = now.saturating_sub(self.since.unwrap_or(now));
        match self.failed {
            0 | 1 => cause.to_owned(),
            n => format!("{cause}; it failed {n} times in {tried:.1?}"),
        }
    }
}

/// A beginning that leaves a heartbeat's time.
fn latest(now: Now, times: &Timeouts) -> Now {
    (now + times.heartbeat).saturating_sub(times.peer_silence)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn times() -> Timeouts {
        Timeouts {
            heartbeat: ms(300),
            peer_silence: ms(1000),
            ..Timeouts::default()
        }
    }

    #[test]
    fn pauses_double_and_the_time_runs_from_the_first_attempt() {
        let mut reach = Reach::default();
        assert_eq!(reach.ends_at(&times()), None);
        reach.trying(ms(100));
        let pauses: Vec<_> = (0..9).map(|i| reach.failed(ms(200 + i), "no")).collect();
        let expected = [40, 80, 160, 320, 640, 1280, 2560, 2560, 2560].map(ms);
        assert_eq!(pauses, expected);
        assert_eq!(reach.ends_at(&times()), Some(ms(1100)));
        assert_eq!(reach.describe(ms(1100)), "no; it failed 9 times in 1.0s");
        assert!(!reach.met());
    }

    #[test]
    fn a_link_that_only_comes_up_stops_no_clock_and_no_pause() {
        let mut reach = Reach::default();
        for (i, pause) in [40, 80, 160].into_iter().enumerate() {
            let now = ms(100 * i as u64);
            reach.trying(now);
            reach.up(now);
            assert_eq!(reach.broke(now + ms(1), now, &times(), "end"), ms(pause));
            assert_eq!(reach.ends_at(&times()), Some(ms(1000)));
        }
        assert!(reach.met());
    }

    #[test]
    fn a_way_that_is_made_stops_the_clock_and_a_link_that_stays_the_pauses_too() {
        let mut reach = Reach::default();
        reach.trying(ms(0));
        reach.failed(ms(0), "no");
        reach.up(ms(100));
        reach.made();
        assert_eq!(reach.ends_at(&times()), None);
        assert_eq!(reach.broke(ms(110), ms(105), &times(), "end"), ms(80));
        assert_eq!(
            reach.ends_at(&times()),
            Some(ms(1105)),
            "the last sign of life"
        );
        reach.up(ms(200));
        assert_eq!(reach.broke(ms(500), ms(450), &times(), "end"), ms(0));
        assert_eq!(reach.ends_at(&times()), Some(ms(1450)));
        assert_eq!(reach.describe(ms(500)), "end");
        assert_eq!(reach.failed(ms(500), "no"), ms(40));
    }

    #[test]
    fn a_link_that_replaces_one_that_has_stayed_starts_anew() {
        let mut reach = Reach::default();
        reach.up(ms(0));
        reach.broke(ms(100), ms(90), &times(), "end");
        reach.up(ms(200));
        reach.replaced(ms(400), &times());
        assert_eq!(reach.ends_at(&times()), Some(ms(1090)), "too soon");
        reach.up(ms(400));
        reach.replaced(ms(50_000), &times());
        assert_eq!(reach.ends_at(&times()), None);
        reach.up(ms(50_000));
        assert_eq!(reach.broke(ms(50_001), ms(50_000), &times(), "end"), ms(40));
        assert_eq!(reach.ends_at(&times()), Some(ms(51_000)));
    }

    #[test]
    fn who_was_stopped_himself_has_time_for_an_attempt() {
        let mut reach = Reach::default();
        reach.up(ms(0));
        reach.broke(ms(9000), ms(50), &times(), "end");
        assert_eq!(reach.ends_at(&times()), Some(ms(9300)));
        reach.extend(ms(20_000), &times());
        assert_eq!(reach.ends_at(&times()), Some(ms(20_300)));
        reach.extend(ms(20_100), &times());
        assert_eq!(reach.ends_at(&times()), Some(ms(20_400)));
        assert_eq!(Reach::default().describe(ms(5)), "no answer");
    }
}
