//! Which CPU each thread runs on, and at which priority.

use crate::error::{Error, Result};
use crate::host_cpus::{CpuList, HostCpus};
use std::str::FromStr;

/// What `--pin` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pinning {
    /// vCPU n on the nth CPU, from the start again where there are more vCPUs.
    InOrder(CpuList),
    /// These vCPUs on these CPUs, the others anywhere.
    Each(Vec<(u32, u32)>),
}

impl FromStr for Pinning {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if !text.contains('=') {
            return Ok(Self::InOrder(text.parse()?));
        }
        let mut pairs: Vec<(u32, u32)> = Vec::new();
        for part in text.split(',') {
            let pair = part.split_once('=').and_then(|(v, c)| Some((v.parse().ok()?, c)));
            let Some((vcpu, cpu)) = pair else {
                return Err("write VCPU=CPU,… or a list of CPUs".into());
            };
            let CpuList(cpus) = cpu.parse()?;
            let [cpu] = cpus[..] else {
                return Err(format!("give vCPU {vcpu} one CPU"));
            };
            if pairs.iter().any(|(other, _)| *other == vcpu) {
                return Err(format!("vCPU {vcpu} is named twice"));
            }
            pairs.push((vcpu, cpu));
        }
        Ok(Self::Each(pairs))
    }
}

impl Pinning {
    /// The CPU of each of `vcpus` vCPUs, if it has one of its own.
    ///
    /// # Errors
    /// A vCPU or a CPU that does not exist.
    pub fn resolve(&self, vcpus: u32, host: &HostCpus) -> Result<Vec<Option<u32>>> {
        let mut places = vec![None; vcpus as usize];
        match self {
            Self::InOrder(CpuList(cpus)) => {
                places.iter_mut().zip(cpus.iter().cycle()).for_each(|(p, cpu)| *p = Some(*cpu));
                for cpu in cpus {
                    host.expect("--pin", *cpu)?;
                }
            }
            Self::Each(pairs) => {
                for (vcpu, cpu) in pairs {
                    host.expect("--pin", *cpu)?;
                    *places.get_mut(*vcpu as usize).ok_or_else(|| {
                        Error::new(format!(
                            "--pin: there is no vCPU {vcpu}; --cpus {vcpus} makes 0-{}",
                            vcpus.saturating_sub(1)
                        ))
                    })? = Some(*cpu);
                }
            }
        }
        Ok(places)
    }
}

/// Where a thread runs, and how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    /// Its only CPU, if it has one.
    pub cpu: Option<u32>,
    /// Its SCHED_FIFO priority, if it is a real-time thread.
    pub rt_priority: Option<u8>,
}

impl Place {
    /// Puts the calling thread there; `flag` is what named the CPU.
    ///
    /// # Errors
    /// One line: the CPU is not for this process, or real time is not for this user.
    pub fn take(self, flag: &str) -> Result<()> {
        if let Some(cpu) = self.cpu {
            set_affinity(cpu).map_err(|e| {
                Error::new(format!("{flag}: this process may not use CPU {cpu} ({e})"))
            })?;
        }
        if let Some(priority) = self.rt_priority {
            set_fifo(priority).map_err(|e| {
                Error::new(format!(
                    "--rt-prio: no real-time scheduling of priority {priority} for this user ({e}); \
                     give it CAP_SYS_NICE or a higher RLIMIT_RTPRIO"
                ))
            })?;
        }
        Ok(())
    }
}

type IoResult<T> = std::io::Result<T>;

fn checked(outcome: libc::c_int) -> IoResult<()> {
    if outcome == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Confines the calling thread to one CPU.
fn set_affinity(cpu: u32) -> IoResult<()> {
    // Not libc's cpu_set_t, which ends at CPU 1023.
    let mut mask = vec![0u64; cpu as usize / 64 + 1];
    mask[cpu as usize / 64] = 1 << (cpu % 64);
    let length = size_of_val(&mask[..]);
    // SAFETY: reads `length` bytes of `mask`; pid 0 is the calling thread.
    checked(unsafe { libc::sched_setaffinity(0, length, mask.as_ptr().cast()) })
}

fn set_fifo(priority: u8) -> IoResult<()> {
    let param = libc::sched_param { sched_priority: priority.into() };
    // SAFETY: reads `param`; pid 0 is the calling thread.
    checked(unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) })
}

/// The CPUs that this thread, and those that it starts, may run on.
pub fn allowed_cpus() -> CpuList {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.and_then(|list| list.parse().ok()).unwrap_or_default()
}

/// Lets timers of the calling thread fire when they are due, not when it suits the
/// kernel to fire several at once (prctl(2), PR_SET_TIMERSLACK: 50 µs by default).
pub fn refuse_timer_slack() {
    // SAFETY: changes a number of the calling thread; cannot fail with these arguments.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_cpus::HostCpu;

    fn host(cpus: u32) -> HostCpus {
        let cpus = (0..cpus).map(|number| HostCpu { number, llc: 0, node: 0 }).collect();
        HostCpus { cpus, set_apart: Default::default() }
    }

    fn resolve(text: &str, vcpus: u32) -> std::result::Result<Vec<Option<u32>>, String> {
        text.parse::<Pinning>()?.resolve(vcpus, &host(4)).map_err(|e| e.to_string())
    }

    #[test]
    fn both_forms_place_vcpus() {
        assert_eq!(resolve("2-3", 2), Ok(vec![Some(2), Some(3)]));
        assert_eq!(resolve("3,1", 3), Ok(vec![Some(3), Some(1), Some(3)]));
        assert_eq!(resolve("1=3", 2), Ok(vec![None, Some(3)]));
        assert_eq!(resolve("0=0,1=0", 2), Ok(vec![Some(0), Some(0)]));
    }

    #[test]
    fn what_does_not_exist_is_named() {
        for (text, word) in [
            ("9999", "CPU 9999"),
            ("0=9999", "CPU 9999"),
            ("7=0", "vCPU 7"),
            ("0=0,0=1", "vCPU 0"),
            ("0=0-1", "vCPU 0"),
            ("0=", "CPU"),
            ("x=0", "VCPU=CPU"),
        ] {
            let refusal = resolve(text, 2).unwrap_err();
            assert!(refusal.contains(word) && !refusal.contains('\n'), "{text}: {refusal}");
        }
    }

    #[test]
    fn a_thread_stays_where_it_is_put() {
        let CpuList(allowed) = allowed_cpus();
        let cpu = *allowed.last().unwrap();
        std::thread::spawn(move || {
            Place { cpu: Some(cpu), rt_priority: None }.take("--pin").unwrap();
            assert_eq!(allowed_cpus(), CpuList(vec![cpu]));
            let refusal = Place { cpu: Some(60_000), rt_priority: None }.take("--pin").unwrap_err();
            assert!(refusal.to_string().contains("CPU 60000"), "{refusal}");
        })
        .join()
        .unwrap();
    }
}
