//! The CMOS real-time clock (MC146818) at ports 0x70 (index) and 0x71 (data).
//!
//! Wall time comes from an injected clock; what the guest sets is kept as an offset to it. BCD
//! and binary, 12-hour and 24-hour modes, the century at 0x32, update-ended in register C, and
//! the CMOS RAM. No interrupt is ever raised: the enable bits of register B read back, and the
//! flags of register C can be polled.
//!
//! UIP is always clear, and truthfully so: a guest that reads the time registers one by one reads
//! them all from one snapshot, so no update can tear what it reads.
//!
//! Threats: the guest may set any nonsense for a time (clamped to a date) and use 128 bytes of
//! RAM.

use std::sync::{Mutex, PoisonError};

use time::{Date, Month, PrimitiveDateTime, Time, UtcDateTime};

use crate::bus::Device;

/// First port.
pub const BASE: u64 = 0x70;
/// Number of ports.
pub const LEN: u64 = 2;

/// Size of the register file and RAM.
const CMOS_LEN: usize = 128;
const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const WEEKDAY: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const REGISTER_A: u8 = 0x0A;
const REGISTER_B: u8 = 0x0B;
const REGISTER_C: u8 = 0x0C;
const REGISTER_D: u8 = 0x0D;
const CENTURY: u8 = 0x32;
/// The registers that tell the time.
const TIME: [u8; 8] = [SECONDS, MINUTES, HOURS, WEEKDAY, DAY, MONTH, YEAR, CENTURY];

/// Register A after reset: 32 768 Hz time base, 1024 Hz periodic rate.
const A_RESET: u8 = 0x26;
/// Register A: update in progress, read-only.
const A_UIP: u8 = 1 << 7;
/// Register B: the guest sets the time, updates wait.
const B_SET: u8 = 1 << 7;
/// Register B: binary instead of BCD.
const B_BINARY: u8 = 1 << 2;
/// Register B: 24 hours instead of 12.
const B_24H: u8 = 1 << 1;
/// Registers B and C: update-ended interrupt enable and flag.
const UPDATE_ENDED: u8 = 1 << 4;
/// Register C: an enabled flag is set.
const C_IRQF: u8 = 1 << 7;
/// Register D: the battery is good.
const D_VALID: u8 = 1 << 7;
/// Hours in 12-hour mode: afternoon.
const PM: u8 = 1 << 7;

/// Wall time in seconds since 1970-01-01 00:00:00 UTC.
pub type WallClock = Box<dyn Fn() -> i64 + Send + Sync>;

/// Everything that a snapshot needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RtcState {
    /// The register that the data port addresses.
    pub index: u8,
    /// Alarm registers, registers A and B, the RAM, and while register B has SET the time.
    pub cmos: [u8; CMOS_LEN],
    /// What the guest's time is ahead of wall time, in seconds.
    pub offset_s: i64,
    /// The guest's time when register C was last read.
    pub flags_read_at: i64,
    /// The snapshot from which time registers are read.
    pub shown: i64,
    /// Time registers read from the snapshot so far, one bit each.
    pub shown_registers: u64,
}

/// The device.
pub struct Rtc {
    state: Mutex<RtcState>,
    wall: WallClock,
}

impl Rtc {
    /// A clock that tells wall time.
    pub fn new(wall: WallClock) -> Self {
        let mut cmos = [0; CMOS_LEN];
        cmos[usize::from(REGISTER_A)] = A_RESET;
        cmos[usize::from(REGISTER_B)] = B_24H;
        let now = wall();
        let state = RtcState {
            index: 0,
            cmos,
            offset_s: 0,
            flags_read_at: now,
            // No snapshot yet.
            shown: i64::MIN,
            shown_registers: 0,
        };
        Self::from_state(state, wall)
    }

    /// A clock as [`Rtc::state`] described it.
    pub fn from_state(state: RtcState, wall: WallClock) -> Self {
        Self { state: Mutex::new(state), wall }
    }

    /// A copy of the registers.
    pub fn state(&self) -> RtcState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl RtcState {
    fn register(&self, register: u8) -> u8 {
        self.cmos[usize::from(register)]
    }

    fn being_set(&self) -> bool {
        self.register(REGISTER_B) & B_SET != 0
    }

    fn read(&mut self, wall: i64) -> u8 {
        let now = wall.saturating_add(self.offset_s);
        match self.index {
            register if TIME.contains(&register) && !self.being_set() => {
                // One snapshot serves each register once and lives for a second at most, so that
                // a guest that polls one register sees it move and one that reads them all sees
                // one moment.
                let bit = 1 << register;
                let age = now.wrapping_sub(self.shown);
                if self.shown_registers & bit != 0 || !(0..=1).contains(&age) {
                    self.show(now);
                }
                self.shown_registers |= bit;
                self.encode(register, date_time(self.shown))
            }
            REGISTER_A => {
                // What the guest reads after it has seen UIP clear is from now on.
                self.show(now);
                self.register(REGISTER_A)
            }
            REGISTER_C => {
                let mut flags = 0;
                if now != self.flags_read_at && !self.being_set() {
                    flags |= UPDATE_ENDED;
                }
                self.flags_read_at = now;
                if flags & self.register(REGISTER_B) != 0 {
                    flags |= C_IRQF;
                }
                flags
            }
            REGISTER_D => D_VALID,
            other => self.register(other),
        }
    }

    fn write(&mut self, value: u8, wall: i64) {
        let slot = usize::from(self.index);
        let was_being_set = self.being_set();
        match self.index {
            register if TIME.contains(&register) && !was_being_set => {
                self.load(wall);
                self.cmos[slot] = value;
                self.commit(wall);
            }
            REGISTER_A => self.cmos[slot] = value & !A_UIP,
            REGISTER_B => {
                if !was_being_set && value & B_SET != 0 {
                    self.load(wall);
                }
                self.cmos[slot] = value;
                if was_being_set && value & B_SET == 0 {
                    self.commit(wall);
                }
            }
            REGISTER_C | REGISTER_D => {}
            _ => self.cmos[slot] = value,
        }
    }

    fn show(&mut self, now: i64) {
        self.shown = now;
        self.shown_registers = 0;
    }

    /// Puts the time into the registers.
    fn load(&mut self, wall: i64) {
        let time = date_time(wall.saturating_add(self.offset_s));
        for register in TIME {
            self.cmos[usize::from(register)] = self.encode(register, time);
        }
    }

    /// Makes what the registers say the time.
    fn commit(&mut self, wall: i64) {
        let time = self.decode().assume_utc().unix_timestamp();
        self.offset_s = time.saturating_sub(wall);
        self.show(time);
    }

    /// A time register's contents at `time`, in the mode of register B.
    fn encode(&self, register: u8, time: UtcDateTime) -> u8 {
        let mode = self.register(REGISTER_B);
        let number = |n: u8| if mode & B_BINARY != 0 { n } else { ((n / 10) << 4) | (n % 10) };
        match register {
            SECONDS => number(time.second()),
            MINUTES => number(time.minute()),
            HOURS if mode & B_24H != 0 => number(time.hour()),
            HOURS => {
                let afternoon = if time.hour() >= 12 { PM } else { 0 };
                number((time.hour() + 11) % 12 + 1) | afternoon
            }
            WEEKDAY => number(time.weekday().number_from_sunday()),
            DAY => number(time.day()),
            MONTH => number(time.month().into()),
            YEAR => number((time.year() % 100) as u8),
            _ => number((time.year() / 100) as u8),
        }
    }

    /// The time that the registers say, in the mode of register B; nonsense is clamped. The day
    /// of the week is not asked.
    fn decode(&self) -> PrimitiveDateTime {
        let mode = self.register(REGISTER_B);
        let number =
            |raw: u8| if mode & B_BINARY != 0 { raw } else { (raw >> 4) * 10 + (raw & 0xF) };
        let field = |register| number(self.register(register));
        let hour = if mode & B_24H != 0 {
            field(HOURS).min(23)
        } else {
            let afternoon = if self.register(HOURS) & PM != 0 { 12 } else { 0 };
            number(self.register(HOURS) & !PM).clamp(1, 12) % 12 + afternoon
        };
        let time = Time::from_hms(hour, field(MINUTES).min(59), field(SECONDS).min(59));
        let year = i32::from(field(CENTURY).min(99)) * 100 + i32::from(field(YEAR).min(99));
        let month = Month::try_from(field(MONTH).clamp(1, 12)).unwrap_or(Month::January);
        let date = Date::from_calendar_date(year, month, field(DAY).clamp(1, month.length(year)));
        PrimitiveDateTime::new(date.unwrap_or(Date::MIN), time.unwrap_or(Time::MIDNIGHT))
    }
}

/// The date of a Unix time, clamped to the years that four BCD digits can tell.
fn date_time(unix_s: i64) -> UtcDateTime {
    const YEAR_0: i64 = -62_167_219_200;
    const YEAR_9999_END: i64 = 253_402_300_799;
    UtcDateTime::from_unix_timestamp(unix_s.clamp(YEAR_0, YEAR_9999_END))
        .unwrap_or(UtcDateTime::UNIX_EPOCH)
}

impl Device for Rtc {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for (port, byte) in (offset..).zip(data) {
            // The index port is write-only.
            *byte = if port == 1 { state.read((self.wall)()) } else { 0xFF };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for (port, &byte) in (offset..).zip(data) {
            match port {
                // Bit 7 masks NMIs on a real board.
                0 => state.index = byte & (CMOS_LEN as u8 - 1),
                _ => state.write(byte, (self.wall)()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    /// 2024-02-29 23:59:59 UTC, a Thursday.
    const LEAP_DAY_END: i64 = 1_709_251_199;

    fn bench(now: i64) -> (Rtc, Arc<AtomicI64>) {
        let wall = Arc::new(AtomicI64::new(now));
        let clock = wall.clone();
        (Rtc::new(Box::new(move || clock.load(Ordering::Relaxed))), wall)
    }

    fn read(rtc: &Rtc, register: u8) -> u8 {
        rtc.write(0, &[register]);
        let mut byte = [0];
        rtc.read(1, &mut byte);
        byte[0]
    }

    fn write(rtc: &Rtc, register: u8, value: u8) {
        rtc.write(0, &[register]);
        rtc.write(1, &[value]);
    }

    fn read_time(rtc: &Rtc) -> [u8; 8] {
        assert_eq!(read(rtc, REGISTER_A) & A_UIP, 0);
        TIME.map(|register| read(rtc, register))
    }

    #[test]
    fn tells_wall_time_in_bcd() {
        let (rtc, wall) = bench(LEAP_DAY_END);
        assert_eq!(read_time(&rtc), [0x59, 0x59, 0x23, 5, 0x29, 0x02, 0x24, 0x20]);
        wall.store(LEAP_DAY_END + 1, Ordering::Relaxed);
        assert_eq!(read_time(&rtc), [0, 0, 0, 6, 0x01, 0x03, 0x24, 0x20]);
    }

    #[test]
    fn binary_and_12_hour_modes() {
        let (rtc, wall) = bench(LEAP_DAY_END);
        write(&rtc, REGISTER_B, B_BINARY);
        assert_eq!(read_time(&rtc), [59, 59, 11 | PM, 5, 29, 2, 24, 20]);
        for (hour, shown) in [(0, 12), (1, 1), (11, 11), (12, 12 | PM), (13, 1 | PM)] {
            wall.store(LEAP_DAY_END + 1 + hour * 3600, Ordering::Relaxed);
            assert_eq!(read_time(&rtc)[2], shown, "hour {hour}");
        }
    }

    #[test]
    fn registers_read_one_by_one_are_never_torn() {
        let (rtc, wall) = bench(LEAP_DAY_END);
        let before = read_time(&rtc);
        // The second passes between any two registers of a read.
        for tick_after in 0..TIME.len() {
            wall.store(LEAP_DAY_END, Ordering::Relaxed);
            assert_eq!(read(&rtc, REGISTER_A) & A_UIP, 0);
            for (i, register) in TIME.into_iter().enumerate() {
                assert_eq!(read(&rtc, register), before[i], "tick after {tick_after}");
                if i == tick_after {
                    wall.store(LEAP_DAY_END + 1, Ordering::Relaxed);
                }
            }
            // Reading the seconds again, as Linux does, tells that time went on.
            assert_eq!(read(&rtc, SECONDS), 0);
        }
    }

    #[test]
    fn a_register_that_is_polled_moves_and_none_is_stale() {
        let (rtc, wall) = bench(LEAP_DAY_END);
        for i in 0..3 {
            wall.store(LEAP_DAY_END + 1 + i, Ordering::Relaxed);
            assert_eq!(read(&rtc, SECONDS), i as u8);
        }
        wall.store(LEAP_DAY_END + 1 + 61, Ordering::Relaxed);
        assert_eq!(read(&rtc, MINUTES), 1);
    }

    #[test]
    fn time_that_the_guest_sets_runs_on_as_an_offset() {
        let (rtc, wall) = bench(LEAP_DAY_END);
        write(&rtc, REGISTER_B, B_24H | B_SET);
        // The 31st before its month, and a second that passes meanwhile.
        let set = [0x30, 0x45, 0x12, 1, 0x31, 0x12, 0x99, 0x19];
        for (register, value) in TIME.into_iter().zip(set) {
            write(&rtc, register, value);
            wall.fetch_add(1, Ordering::Relaxed);
        }
        assert_eq!(TIME.map(|register| read(&rtc, register)), set, "time stands still");
        write(&rtc, REGISTER_B, B_24H);
        // 1999-12-31 was a Friday.
        assert_eq!(read_time(&rtc), [0x30, 0x45, 0x12, 6, 0x31, 0x12, 0x99, 0x19]);
        wall.fetch_add(30, Ordering::Relaxed);
        assert_eq!(read_time(&rtc)[..2], [0x00, 0x46]);
        // A single register, without SET.
        write(&rtc, HOURS, 0x01);
        assert_eq!(read_time(&rtc)[..3], [0x00, 0x46, 0x01]);
    }

    #[test]
    fn nonsense_is_clamped_to_a_date() {
        let (rtc, _) = bench(LEAP_DAY_END);
        write(&rtc, REGISTER_B, B_24H | B_SET);
        for register in TIME {
            write(&rtc, register, 0xFF);
        }
        write(&rtc, REGISTER_B, B_24H);
        assert_eq!(read_time(&rtc), [0x59, 0x59, 0x23, 6, 0x31, 0x12, 0x99, 0x99]);
        write(&rtc, MONTH, 0x02);
        assert_eq!(read_time(&rtc)[4..6], [0x28, 0x02]);
    }

    #[test]
    fn update_ended_once_per_second_and_reading_clears_it() {
        let (rtc, wall) = bench(LEAP_DAY_END);
        assert_eq!(read(&rtc, REGISTER_C), 0);
        wall.fetch_add(1, Ordering::Relaxed);
        assert_eq!(read(&rtc, REGISTER_C), UPDATE_ENDED);
        assert_eq!(read(&rtc, REGISTER_C), 0);
        write(&rtc, REGISTER_B, B_24H | UPDATE_ENDED);
        wall.fetch_add(1, Ordering::Relaxed);
        assert_eq!(read(&rtc, REGISTER_C), UPDATE_ENDED | C_IRQF);
    }

    #[test]
    fn battery_is_good_and_ram_keeps_what_it_is_given() {
        let (rtc, _) = bench(LEAP_DAY_END);
        assert_eq!(read(&rtc, REGISTER_D), D_VALID);
        write(&rtc, 0x7F, 0xA5);
        write(&rtc, 0xFF, 0x5A);
        assert_eq!(read(&rtc, 0x7F), 0x5A, "bit 7 of the index is the NMI mask");
        write(&rtc, REGISTER_A, 0xFF);
        assert_eq!(read(&rtc, REGISTER_A), 0x7F);
    }

    #[test]
    fn any_wall_time_is_a_date() {
        for now in [i64::MIN, -1, 0, i64::MAX] {
            let (rtc, _) = bench(now);
            read_time(&rtc);
            write(&rtc, CENTURY, 0x99);
            read_time(&rtc);
        }
    }

    #[test]
    fn state_survives_a_round_trip() {
        let (rtc, _) = bench(LEAP_DAY_END);
        write(&rtc, YEAR, 0x30);
        let copy = Rtc::from_state(rtc.state(), Box::new(|| LEAP_DAY_END));
        assert_eq!(copy.state(), rtc.state());
        assert_eq!(read_time(&copy)[6], 0x30);
    }
}
