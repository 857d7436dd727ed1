//! The reader's side: one import from begin to the moment its slots are safe.
//!
//! An import has one job per source rank. Jobs start when they can, and the import ends together:
//! in success when every job has been attested, else with the first cause. The outcome and the
//! safety of the slots are separate: slots are safe when no job is running any more.

use std::time::Duration;

use super::{End, Now};
use crate::error::Status::*;

/// What happens to an import. `usize` is the job's index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The job has everything it needs: link, data path, source slots.
    Ready(usize),
    /// The job's copy has returned: bytes attested, or why not.
    Stopped(usize, End),
    /// The source ended the publication, or the link to it is lost.
    SourceLost(usize, End),
    /// Nobody is left who could send to a receive.
    NoSender(End),
    /// Something on our side failed; copies that run stop.
    Failed(End),
    /// The caller cancels.
    Cancel,
    /// The agent ends.
    Shutdown,
    /// Time has passed.
    Tick,
}

/// What must be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Tell the source that reading begins and start the copy.
    Start(usize),
    /// Make a running copy stop after its current piece.
    Stop(usize),
    /// Tell the source that we are still here.
    Renew(usize),
    /// Report the outcome.
    Outcome(End),
    /// Tell the source the outcome; repeat until it answers or its lease has ended.
    Tell(usize, End),
    /// The slots may be reused.
    MemorySafe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Job {
    Waiting,
    Running,
    Attested,
    Stopped,
}

/// One import.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Import {
    jobs: Vec<Job>,
    deadline: Now,
    renew_every: Duration,
    renew_at: Now,
    outcome: Option<End>,
    safe: bool,
}

impl Import {
    /// An import of `jobs` jobs, each waiting.
    pub fn new(now: Now, jobs: usize, deadline: Now, renew_every: Duration) -> Self {
        Self {
            jobs: vec![Job::Waiting; jobs],
            deadline,
            renew_every,
            renew_at: now + renew_every,
            outcome: None,
            safe: false,
        }
    }

    /// Sets the number of jobs, once it is known (a receive learns it from the first sender).
    pub fn expect(&mut self, jobs: usize) {
        if self.jobs.is_empty() && self.outcome.is_none() {
            self.jobs = vec![Job::Waiting; jobs];
        }
    }

    /// When [`Event::Tick`] is due; `None` after the outcome.
    pub fn next_deadline(&self) -> Option<Now> {
        match self.outcome {
            Some(_) => None,
            None => Some(self.deadline.min(self.renew_at)),
        }
    }

    /// The outcome, if there is one.
    pub fn outcome(&self) -> Option<&End> {
        self.outcome.as_ref()
    }

    /// Nothing will touch the slots any more.
    pub fn is_safe(&self) -> bool {
        self.safe
    }

    /// Takes one event.
    pub fn on(&mut self, event: Event, now: Now) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Ready(job) => {
                if self.outcome.is_none() && self.jobs.get(job) == Some(&Job::Waiting) {
                    self.jobs[job] = Job::Running;
                    actions.push(Action::Start(job));
                }
            }
            Event::Stopped(job, end) => {
                if self.jobs.get(job) == Some(&Job::Running) {
                    self.jobs[job] = if end.is_ok() {
                        Job::Attested
                    } else {
                        Job::Stopped
                    };
                    if !end.is_ok() {
                        self.fail(end, &mut actions);
                    } else if self.jobs.iter().all(|j| *j == Job::Attested) {
                        self.decide(End::ok(), &mut actions);
                    }
                }
            }
            Event::SourceLost(job, end) => {
                // A job whose bytes are attested needs its source no more.
                if matches!(self.jobs.get(job), Some(Job::Waiting | Job::Running)) {
                    self.fail(end, &mut actions);
                }
            }
            Event::NoSender(end) => {
                if self.jobs.is_empty() {
                    self.fail(end, &mut actions);
                }
            }
            Event::Failed(end) => self.fail(end, &mut actions),
            Event::Cancel => self.fail(
                End::new(KVF_ERR_CANCELLED, "cancelled by this side"),
                &mut actions,
            ),
            Event::Shutdown => self.fail(
                End::new(KVF_ERR_SHUTDOWN, "this agent has shut down"),
                &mut actions,
            ),
            Event::Tick => self.tick(now, &mut actions),
        }
        if self.outcome.is_some() && !self.safe && !self.jobs.contains(&Job::Running) {
            self.safe = true;
            actions.push(Action::MemorySafe);
        }
        actions
    }

    fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.outcome.is_some() {
            return;
        }
        if now >= self.deadline {
            let count = |state| self.jobs.iter().filter(|j| **j == state).count();
            let text = match self.jobs.len() {
                0 => "the deadline passed: nobody has pushed".into(),
                ranks => format!(
                    "the deadline passed: of {ranks} source ranks, {} were not started, {} still copied",
                    count(Job::Waiting),
                    count(Job::Running)
                ),
            };
            self.fail(End::new(KVF_ERR_DEADLINE, text), actions);
        } else if now >= self.renew_at {
            self.renew_at = now + self.renew_every;
            for (at, job) in self.jobs.iter().enumerate() {
                // Also those that are attested: their source hears of the end with the others.
                if *job != Job::Stopped {
                    actions.push(Action::Renew(at));
                }
            }
        }
    }

    fn fail(&mut self, end: End, actions: &mut Vec<Action>) {
        if self.outcome.is_none() {
            for (at, job) in self.jobs.iter().enumerate() {
                if *job == Job::Running {
                    actions.push(Action::Stop(at));
                }
            }
            self.decide(end, actions);
        }
    }

    /// The first outcome stays: bytes that are attested after a time-out or a cancel come too
    /// late.
    fn decide(&mut self, end: End, actions: &mut Vec<Action>) {
        if self.outcome.is_some() {
            return;
        }
        self.outcome = Some(end.clone());
        actions.push(Action::Outcome(end.clone()));
        for at in 0..self.jobs.len() {
            actions.push(Action::Tell(at, end.clone()));
        }
    }
}
