//! Devices, streams, events and the clock of the stages.

use super::compiler::{Capability, Version};
use super::memory::{Buffer, Ledger, Pinned, Plain};
use super::program::{Args, Kernel, Launch};
use super::{CudaError, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};
use std::sync::Arc;

/// The oldest driver that has every call used here (525, of 2022).
const OLDEST_DRIVER: Version = Version(12, 0);
/// cp.async, and fp16 products with this fragment layout.
const OLDEST_CAPABILITY: Capability = Capability(8, 0);

pub(super) fn check<T>(call: &str, outcome: std::result::Result<T, result::DriverError>) -> Result<T> {
    outcome.map_err(|e| CudaError::Call { call: call.into(), reason: e.to_string() })
}

/// The CUDA version that the installed driver supports. Errors: `NoDriver`, `Call`.
pub fn driver_version() -> Result<Version> {
    // SAFETY: opens a shared library by name. cudarc panics in every other call when there is none.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: libcuda is there; the call writes one integer and needs no initialisation.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    Ok(Version(version / 1000, version % 1000 / 10))
}

fn initialise() -> Result<usize> {
    let found = driver_version()?;
    if found < OLDEST_DRIVER {
        return Err(CudaError::DriverTooOld { found, needed: OLDEST_DRIVER });
    }
    let no_device = |reason: String| CudaError::NoDevice { reason };
    result::init().map_err(|e| match e.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => no_device("the driver finds none".into()),
        _ => no_device(format!("cuInit failed: {e}")),
    })?;
    match check("cuDeviceGetCount", result::device::get_count())? {
        count if count > 0 => Ok(count as usize),
        _ => Err(no_device("the driver finds none".into())),
    }
}

/// One GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// N of `gpu:N`.
    pub ordinal: usize,
    /// For example `NVIDIA H200`.
    pub name: String,
    /// Which machine code it runs.
    pub capability: Capability,
    /// Its memory in bytes.
    pub total_memory: usize,
    /// Its multiprocessors.
    pub multiprocessors: u32,
}

impl DeviceInfo {
    fn of(ordinal: usize) -> Result<Self> {
        use sys::CUdevice_attribute as A;
        let device = check("cuDeviceGet", result::device::get(ordinal as i32))?;
        // SAFETY: `device` is a valid handle.
        let attribute = |a| check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, a) });
        Ok(DeviceInfo {
            ordinal,
            name: check("cuDeviceGetName", result::device::get_name(device))?,
            capability: Capability(
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: `device` is a valid handle.
            total_memory: check("cuDeviceTotalMem", unsafe { result::device::total_mem(device) })?,
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        })
    }
}

/// All GPUs that this process sees. Errors: `NoDriver`, `DriverTooOld`, `NoDevice`.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    (0..initialise()?).map(DeviceInfo::of).collect()
}

/// A GPU in use: the primary context, shared with whatever else in this process uses that GPU.
pub struct Device {
    context: Arc<CudaContext>,
    info: DeviceInfo,
    driver: Version,
    ledger: Arc<Ledger>,
}

impl Device {
    /// Opens GPU `ordinal`. Errors: `NoDriver`, `DriverTooOld`, `NoDevice`, `NoSuchDevice`, `DeviceTooOld`, `Call`.
    pub fn open(ordinal: usize) -> Result<Self> {
        let count = initialise()?;
        if ordinal >= count {
            return Err(CudaError::NoSuchDevice { ordinal, count });
        }
        let info = DeviceInfo::of(ordinal)?;
        if info.capability < OLDEST_CAPABILITY {
            return Err(CudaError::DeviceTooOld { ordinal, name: info.name, capability: info.capability });
        }
        let context = check("cuDevicePrimaryCtxRetain", CudaContext::new(ordinal))?;
        // SAFETY: cudarc's own slices, which the tracking would order between streams, are not used here.
        unsafe { context.disable_event_tracking() };
        Ok(Device { context, info, driver: driver_version()?, ledger: Arc::default() })
    }
    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }
    /// The CUDA version of the driver.
    pub fn driver(&self) -> Version {
        self.driver
    }
    /// cudarc's context, for its other libraries.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }
    /// Bytes that can be allocated now; other processes take from the same memory.
    pub fn free_memory(&self) -> Result<usize> {
        Ok(check("cuMemGetInfo", self.context.mem_get_info())?.0)
    }
    /// Bytes that this device's buffers hold now.
    pub fn held_memory(&self) -> usize {
        self.ledger.held()
    }
    /// The most bytes held at once since the start or the last [`Device::restart_peak`].
    pub fn peak_memory(&self) -> usize {
        self.ledger.peak()
    }
    /// Starts a new peak at what is held now.
    pub fn restart_peak(&self) {
        self.ledger.restart_peak();
    }
    /// `len` values with undefined contents. Errors: `OutOfMemory`.
    pub fn allocate<T: Plain>(&self, len: usize) -> Result<Buffer<T>> {
        Buffer::new(&self.context, &self.ledger, len)
    }
    /// `len` zeros, ready for any stream. Errors: `OutOfMemory`.
    pub fn zeros<T: Plain>(&self, len: usize) -> Result<Buffer<T>> {
        let mut buffer = self.allocate(len)?;
        let stream = self.default_stream();
        stream.zero(&mut buffer, len)?;
        stream.synchronize()?;
        Ok(buffer)
    }
    /// A copy of `values` on the device, ready for any stream. Errors: `OutOfMemory`.
    pub fn upload<T: Plain>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.allocate(values.len())?;
        self.default_stream().upload(values, &mut buffer)?;
        Ok(buffer)
    }
    /// `len` zeros in page-locked host memory. Errors: `OutOfMemory`.
    pub fn pinned<T: Plain>(&self, len: usize) -> Result<Pinned<T>> {
        Pinned::new(&self.context, len)
    }
    /// The legacy default stream.
    pub fn default_stream(&self) -> Stream {
        Stream { raw: self.context.default_stream() }
    }
    /// A new stream, not ordered with others.
    pub fn stream(&self) -> Result<Stream> {
        Ok(Stream { raw: check("cuStreamCreate", self.context.new_stream())? })
    }
    /// Waits for everything on the device.
    pub fn synchronize(&self) -> Result<()> {
        check("cuCtxSynchronize", self.context.synchronize())
    }
    /// Banner text, for example `NVIDIA H200, gpu:0, sm_90`.
    pub fn describe(&self) -> String {
        format!("{}, gpu:{}, {}", self.info.name, self.info.ordinal, self.info.capability)
    }
}

/// A queue of copies and launches that run in order.
#[derive(Clone)]
pub struct Stream {
    raw: Arc<CudaStream>,
}

impl Stream {
    /// cudarc's stream, for cuBLAS and graphs.
    pub fn raw(&self) -> &Arc<CudaStream> {
        &self.raw
    }
    pub(super) fn handle(&self) -> sys::CUstream {
        self.raw.cu_stream()
    }
    pub(super) fn bind(&self) -> Result<()> {
        check("cuCtxSetCurrent", self.raw.context().bind_to_thread())
    }
    /// Waits for everything queued so far. A fault inside a kernel shows here.
    pub fn synchronize(&self) -> Result<()> {
        check("cuStreamSynchronize", self.raw.synchronize())
    }
    /// Queues a kernel. A grid or block without threads is nothing to do.
    ///
    /// # Safety
    /// `args` must match the kernel's parameters in number, order and size, every pointer must be device memory of
    /// the extent that the kernel uses, alive until it ends, and no other work may touch what it writes meanwhile.
    pub unsafe fn launch(&self, kernel: &Kernel, launch: Launch, args: &mut Args) -> Result<()> {
        if launch.is_empty() {
            return Ok(());
        }
        self.bind()?;
        kernel.allow_shared(launch.shared)?;
        let [gx, gy, gz] = launch.grid;
        let [bx, by, bz] = launch.block;
        // SAFETY: the caller's promise; the function belongs to a module that `kernel` keeps loaded.
        let outcome = unsafe {
            result::launch_kernel(
                kernel.function(),
                (gx, gy, gz),
                (bx, by, bz),
                launch.shared,
                self.handle(),
                &mut args.addresses(),
            )
        };
        outcome.map_err(|e| CudaError::Call {
            call: format!("launch of {} ({launch:?})", kernel.name()),
            reason: e.to_string(),
        })
    }
    pub(super) fn record(&self) -> Result<CudaEvent> {
        check("cuEventRecord", self.raw.record_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)))
    }
    /// An event with a time stamp, after everything queued so far.
    pub fn mark(&self) -> Result<Event> {
        Ok(Event { raw: check("cuEventRecord", self.raw.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)))? })
    }
    /// What is queued from now on waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        check("cuStreamWaitEvent", self.raw.wait(&event.raw))
    }
}

/// A point in a stream.
pub struct Event {
    raw: CudaEvent,
}

impl Event {
    /// Marks the present end of `stream` anew.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        check("cuEventRecord", self.raw.record(&stream.raw))
    }
    /// Waits until the work before it is through.
    pub fn synchronize(&self) -> Result<()> {
        check("cuEventSynchronize", self.raw.synchronize())
    }
    /// Seconds from `earlier` to this; waits for both.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        earlier.synchronize()?;
        self.synchronize()?;
        let mut milliseconds = 0.0f32;
        let (start, end) = (earlier.raw.cu_event(), self.raw.cu_event());
        // cudarc's own call needs a driver of CUDA 12.8; every libcuda has this one.
        // SAFETY: libcuda is loaded; the signature is cuda.h's; both are live events with time stamps.
        let outcome = unsafe {
            type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
            let call = sys::culib().get::<Elapsed>(b"cuEventElapsedTime\0");
            call.map(|elapsed| elapsed(&mut milliseconds, start, end).result())
        };
        let failed = |reason: String| CudaError::Call { call: "cuEventElapsedTime".into(), reason };
        outcome.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

/// Time of each stage on the GPU, from events that are read after the step, so that measuring does not wait.
#[derive(Default)]
pub struct StageClock {
    running: Option<(&'static str, Event)>,
    finished: Vec<(&'static str, Event, Event)>,
    spare: Vec<Event>,
    totals: Vec<(&'static str, u64, f64)>,
}

impl StageClock {
    /// Begins `stage`, ending the one before. Stages keep the order of their first call.
    pub fn start(&mut self, stream: &Stream, stage: &'static str) -> Result<()> {
        self.stop(stream)?;
        let event = self.event(stream)?;
        self.running = Some((stage, event));
        Ok(())
    }
    /// Ends the running stage.
    pub fn stop(&mut self, stream: &Stream) -> Result<()> {
        if let Some((stage, start)) = self.running.take() {
            let end = self.event(stream)?;
            self.finished.push((stage, start, end));
        }
        Ok(())
    }
    /// Waits for the stages ended so far and adds their times.
    pub fn collect(&mut self) -> Result<()> {
        for (stage, start, end) in self.finished.drain(..) {
            let seconds = end.seconds_since(&start)?;
            match self.totals.iter_mut().find(|(name, ..)| *name == stage) {
                Some((_, calls, total)) => {
                    *calls += 1;
                    *total += seconds;
                }
                None => self.totals.push((stage, 1, seconds)),
            }
            self.spare.extend([start, end]);
        }
        Ok(())
    }
    /// (stage, calls, seconds) of what was collected.
    pub fn totals(&self) -> &[(&'static str, u64, f64)] {
        &self.totals
    }
    fn event(&mut self, stream: &Stream) -> Result<Event> {
        match self.spare.pop() {
            Some(event) => event.record(stream).map(|()| event),
            None => stream.mark(),
        }
    }
}
