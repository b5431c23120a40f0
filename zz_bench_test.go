package copilot

// The benchmarks: each piece of work over an in-memory pipe and over a child's stdio, and beside it, as "limit", what the bare work costs over
// the same transport: frames read and walked once, requests written as they were encoded before. One run gives the ratio:
//
//	go test -run '^$' -bench . -cpu 2 .
//
// cpu-ns/op is the CPU time of this process for one operation, without the child's; ns/op is the time that passed. The pipe's server is
// part of this process, so it has no such number. Allocations are the client's in both.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// benchServer is a server that costs little: its frames are encoded before they are asked for, and what it writes goes out together.
type benchServer struct {
	in     *bufio.Reader
	out    io.Writer
	body   []byte
	outbox []byte
	frames map[string][][]byte // of events, by the params of the request for them
	tools  [][]byte            // tool calls that are to be sent
	open   int                 // tool calls that wait for their answer
	asked  []byte              // id of the request for tool calls
	calls  int
}

const benchWrite = 64 << 10

func newBenchServer(in io.Reader, out io.Writer) *benchServer {
	return &benchServer{in: bufio.NewReaderSize(in, benchWrite), out: out, frames: make(map[string][][]byte)}
}

// serve answers until the client goes away.
func (s *benchServer) serve() {
	for {
		if s.in.Buffered() == 0 && !s.flush() {
			return
		}
		line, err := s.in.ReadSlice('\n')
		if err != nil {
			return
		}
		n := int(parseLength(bytes.TrimSpace(line[len("Content-Length:"):])))
		if _, err = s.in.Discard(len("\r\n")); err != nil || n < 0 {
			return
		}
		if cap(s.body) < n {
			s.body = make([]byte, n)
		}
		if _, err = io.ReadFull(s.in, s.body[:n]); err != nil {
			return
		}
		s.request(s.body[:n])
	}
}

func (s *benchServer) flush() bool {
	if len(s.outbox) == 0 { // to a net.Pipe even nothing is a write that waits
		return true
	}
	_, err := s.out.Write(s.outbox)
	s.outbox = s.outbox[:0]
	return err == nil
}

func (s *benchServer) send(frame []byte) {
	s.outbox = append(s.outbox, frame...)
	if len(s.outbox) >= benchWrite {
		s.flush()
	}
}

func (s *benchServer) answer(id []byte, result string) {
	n := len(`{"jsonrpc":"2.0","id":,"result":}`) + len(id) + len(result)
	s.outbox = strconv.AppendInt(append(s.outbox, "Content-Length: "...), int64(n), 10)
	s.outbox = append(append(s.outbox, "\r\n\r\n"+`{"jsonrpc":"2.0","id":`...), id...)
	s.outbox = append(append(append(s.outbox, `,"result":`...), result...), '}')
}

func (s *benchServer) request(body []byte) {
	var m message
	if !m.parse(body) {
		return
	}
	switch string(m.method) {
	case `"connect"`:
		s.answer(m.id, `{"ok":true,"protocolVersion":3,"version":"1.0.102"}`)
	case `"session.create"`:
		s.answer(m.id, `{"sessionId":`+string(m.sessionID)+`,"workspacePath":"/w","capabilities":{"ui":{"elicitation":true}}}`)
	case `"bench.emit"`:
		n, frames := s.framesOf(m.params)
		for i := range n {
			s.send(frames[i%len(frames)])
		}
		s.answer(m.id, `{}`)
	case `"bench.tools"`:
		n, frames := s.framesOf(m.params)
		s.asked = append(s.asked[:0], m.id...)
		s.tools, s.open = frames[:n], n
		inFlight, _ := strconv.Atoi(string(member(m.params, "inFlight")))
		for range min(inFlight, n) {
			s.callTool()
		}
	case `"session.tools.handlePendingToolCall"`:
		s.answer(m.id, `{"success":true}`)
		s.callTool()
		if s.open--; s.open == 0 {
			s.answer(s.asked, `{}`)
		}
	default:
		s.answer(m.id, `{"message":"pong","protocolVersion":3}`)
	}
}

// callTool sends the next tool call. Each has a request id of its own, as a server's have: the client takes a known one for a repetition.
func (s *benchServer) callTool() {
	if len(s.tools) > 0 {
		s.calls++
		digits := s.tools[0][bytes.Index(s.tools[0], []byte("request-"))+len("request-"):]
		for i, n := 9, s.calls; n > 0; i, n = i-1, n/10 {
			digits[i] = '0' + byte(n%10)
		}
		s.send(s.tools[0])
		s.tools = s.tools[1:]
	}
}

// benchWork is what a benchServer is asked to send: n events in turn to as many sessions, whose names are s0 and so on.
type benchWork struct {
	Kind     string `json:"kind"` // what Size is of: "delta" or "tool"
	Size     int    `json:"size"` // bytes of a body
	Sessions int    `json:"sessions"`
	InFlight int    `json:"inFlight"` // tool calls
	N        int    `json:"n"`        // stands last: frames are kept for what stands before
}

func (w benchWork) params(n int) json.RawMessage {
	w.N = n
	raw, _ := json.Marshal(w)
	return raw
}

// batch is how many events are asked for at once: fewer than a session's buffer holds, so that nobody lags, and no more than 16 MB.
func (w benchWork) batch() int { return max(1, min(defaultEventBuffer, 16<<20/w.Size)) }

func (s *benchServer) framesOf(params []byte) (n int, frames [][]byte) {
	key, _, _ := bytes.Cut(params, []byte(`"n":`))
	n, _ = strconv.Atoi(string(member(params, "n")))
	if frames = s.frames[string(key)]; frames == nil {
		var w benchWork
		_ = json.Unmarshal(params, &w)
		frames = w.frames()
		s.frames[string(key)] = frames
	}
	return n, frames
}

func (w benchWork) frames() (frames [][]byte) {
	for i := range max(w.Sessions, w.batch()) {
		event := map[string]any{"type": "assistant.message_delta", "id": newUUID(), "parentId": newUUID(),
			"timestamp": "2026-01-02T03:04:05.678Z", "ephemeral": true}
		data := map[string]any{"messageId": newUUID(), "deltaContent": ""}
		filler := "deltaContent"
		if w.Kind == "tool" {
			event["type"] = "external_tool.requested"
			filler = "workingDirectory"
			data = map[string]any{"requestId": "request-0000000000", "toolCallId": newUUID(), "toolName": "t", "arguments": map[string]any{"q": "x"}, filler: ""}
		}
		event["data"] = data
		m := notification("session.event", map[string]any{"sessionId": fmt.Sprint("s", i%w.Sessions), "event": event})
		bare, _ := json.Marshal(m)
		words := strings.Repeat("some words ", w.Size/11+1)
		data[filler] = words[:max(0, w.Size-len(bare))]
		frames = append(frames, encodeFrame(m))
		if w.Size >= 1<<20 {
			return frames // one is enough to be copied
		}
	}
	return frames
}

// benchTransports runs f over each transport.
func benchTransports(b *testing.B, f func(b *testing.B, transport string)) {
	for _, transport := range []string{"pipe", "child"} {
		b.Run(transport, func(b *testing.B) { f(b, transport) })
	}
}

// benchDial connects to a benchServer. The connection ends with the benchmark.
func benchDial(b testing.TB, transport string) io.ReadWriteCloser {
	if transport == "pipe" {
		near, far := net.Pipe()
		done := make(chan struct{})
		go func() { // ends when the near end is closed
			defer close(done)
			newBenchServer(far, far).serve()
		}()
		b.Cleanup(func() {
			near.Close()
			await(b, "server's end", done)
		})
		return near
	}
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "COPILOT_TEST_CHILD=bench")
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	if inErr != nil || outErr != nil {
		b.Fatal(inErr, outErr)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	return &stdioPipes{out, in}
}

func benchClient(b testing.TB, transport string) *Client {
	c, err := NewClient(testContext(b), benchDial(b, transport), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		c.ForceStop()
		await(b, "client's end", c.Done())
	})
	return c
}

// cpuTime is the CPU time of this process so far, 0 where the system does not tell in a file.
func cpuTime() time.Duration {
	stat, _ := os.ReadFile("/proc/self/stat")
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * (time.Second / 100)
}

// benchMeasure runs f, which does the work b.N times, as what is measured.
func benchMeasure(b *testing.B, transport string, f func()) {
	b.ReportAllocs()
	runtime.GC()
	before := cpuTime()
	b.ResetTimer()
	f()
	b.StopTimer()
	if used := cpuTime() - before; transport == "child" && used > 0 {
		b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/op")
	}
}

// benchBatches asks for b.N events, batch by batch, each when the one before has been dealt with.
func benchBatches(b *testing.B, w benchWork, batch func(n int)) {
	for sent, size := 0, w.batch(); sent < b.N; sent += size {
		batch(min(size, b.N-sent))
	}
}

func BenchmarkEvent(b *testing.B) {
	reads := []struct {
		name string
		read func(b *testing.B, e Event)
	}{
		{"envelope", func(b *testing.B, e Event) {
			if e.Type != EventAssistantMessageDelta {
				b.Error(e.Type)
			}
		}},
		{"payload", func(b *testing.B, e Event) {
			if d, ok := e.Payload().(*AssistantMessageDelta); !ok || d.DeltaContent == "" {
				b.Error("no text")
			}
		}},
	}
	benchTransports(b, func(b *testing.B, transport string) {
		for _, size := range []int{414, 1 << 10, 64 << 10, 1 << 20, 16 << 20} {
			w := benchWork{Kind: "delta", Size: size, Sessions: 1}
			for _, read := range reads {
				b.Run(fmt.Sprintf("size=%d/%s", size, read.name), func(b *testing.B) { benchEvents(b, transport, w, 1, read.read) })
			}
			b.Run(fmt.Sprintf("size=%d/envelope-limit", size), func(b *testing.B) { benchEventLimit(b, transport, w, false) })
			b.Run(fmt.Sprintf("size=%d/payload-limit", size), func(b *testing.B) { benchEventLimit(b, transport, w, true) })
		}
		w := benchWork{Kind: "delta", Size: 414, Sessions: 1}
		for _, subscribers := range []int{1, 10, 100, 1000} {
			b.Run(fmt.Sprintf("subscribers=%d", subscribers), func(b *testing.B) { benchEvents(b, transport, w, subscribers, reads[0].read) })
		}
		for _, sessions := range []int{1, 16, 256, 10_000} {
			w.Sessions = sessions
			b.Run(fmt.Sprintf("sessions=%d", sessions), func(b *testing.B) { benchEvents(b, transport, w, 1, reads[0].read) })
		}
	})
}

// benchEvents: each session has so many subscribers, which read every event.
func benchEvents(b *testing.B, transport string, w benchWork, subscribers int, read func(b *testing.B, e Event)) {
	c := benchClient(b, transport)
	ctx, cancel := context.WithCancel(context.Background())
	var left atomic.Int64
	var readers sync.WaitGroup
	done := make(chan struct{}, 1)
	for i := range w.Sessions {
		s, err := c.CreateSession(ctx, &SessionConfig{SessionID: fmt.Sprint("s", i)})
		if err != nil {
			b.Fatal(err)
		}
		for range subscribers {
			sub := s.Subscribe()
			readers.Add(1)
			go func() { // ends with ctx
				defer readers.Done()
				for e, err := range sub.All(ctx) {
					if err != nil {
						if ctx.Err() == nil {
							b.Error(err)
						}
						return
					}
					read(b, e)
					if left.Add(-1) == 0 {
						done <- struct{}{}
					}
				}
			}()
		}
	}
	defer readers.Wait()
	defer cancel()
	ask := func(n int) {
		left.Store(int64(n * subscribers))
		if err := c.Call(ctx, "bench.emit", w.params(n), nil); err != nil {
			b.Fatal(err)
		}
		<-done
	}
	ask(w.batch()) // the server makes its frames
	b.SetBytes(int64(w.Size))
	benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
	if subscribers > 1 {
		b.ReportMetric(float64(b.Elapsed())/float64(b.N)/float64(subscribers), "ns/read")
	}
}

// benchEventLimit reads the same frames, walks them once and keeps nothing; or decodes the payload with encoding/json.
func benchEventLimit(b *testing.B, transport string, w benchWork, payload bool) {
	rwc := benchDial(b, transport)
	r := newFrameReader(rwc, defaultMaxFrame)
	ask := func(n int) {
		request := notification("bench.emit", w.params(n))
		request["id"] = 1
		if _, err := rwc.Write(encodeFrame(request)); err != nil {
			b.Fatal(err)
		}
		for range n + 1 {
			m := benchRead(b, r)
			if payload && m.event != nil {
				var d AssistantMessageDelta
				if err := json.Unmarshal(m.fields.data, &d); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	ask(w.batch())
	b.SetBytes(int64(w.Size))
	benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
}

// benchRead reads a frame and walks it.
func benchRead(b *testing.B, r *frameReader) (m message) {
	body, err := r.next()
	if err != nil || !m.parse(body) {
		b.Fatal("no message: ", err)
	}
	return m
}

func BenchmarkCall(b *testing.B) {
	benchTransports(b, func(b *testing.B, transport string) {
		for _, callers := range []int{1, 16, 256} {
			b.Run(fmt.Sprintf("callers=%d/call", callers), func(b *testing.B) {
				c := benchClient(b, transport)
				benchMeasure(b, transport, func() {
					var left atomic.Int64
					left.Store(int64(b.N))
					var done sync.WaitGroup
					for range callers {
						done.Add(1)
						go func() { // ends when all calls are made
							defer done.Done()
							for left.Add(-1) >= 0 {
								if err := c.Call(context.Background(), "ping", nil, nil); err != nil {
									b.Error(err)
									return
								}
							}
						}()
					}
					done.Wait()
				})
			})
			b.Run(fmt.Sprintf("callers=%d/limit", callers), func(b *testing.B) {
				rwc := benchDial(b, transport)
				r := newFrameReader(rwc, defaultMaxFrame)
				request := encodeFrame(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": struct{}{}})
				requests := bytes.Repeat(request, callers)
				benchMeasure(b, transport, func() {
					for left := b.N; left > 0; left -= callers {
						n := min(left, callers)
						if _, err := rwc.Write(requests[:n*len(request)]); err != nil {
							b.Fatal(err)
						}
						for range n {
							benchRead(b, r)
						}
					}
				})
			})
		}
	})
}

// BenchmarkTool is a tool call of the server: its event, the handler, the answer, and the server's answer to that.
func BenchmarkTool(b *testing.B) {
	benchTransports(b, func(b *testing.B, transport string) {
		for _, inFlight := range []int{1, 64} {
			w := benchWork{Kind: "tool", Size: 414, Sessions: 1, InFlight: inFlight}
			b.Run(fmt.Sprintf("inflight=%d/tool", inFlight), func(b *testing.B) {
				c := benchClient(b, transport)
				tool := Tool{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "done"}, nil }}
				if _, err := c.CreateSession(testContext(b), &SessionConfig{SessionID: "s0", Tools: []Tool{tool}}); err != nil {
					b.Fatal(err)
				}
				ask := func(n int) {
					if err := c.Call(context.Background(), "bench.tools", w.params(n), nil); err != nil {
						b.Fatal(err)
					}
				}
				ask(w.batch())
				benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
			})
			b.Run(fmt.Sprintf("inflight=%d/limit", inFlight), func(b *testing.B) {
				rwc := benchDial(b, transport)
				r := newFrameReader(rwc, defaultMaxFrame)
				params := map[string]any{"sessionId": "s0", "requestId": newUUID(), "result": "done"}
				answer := encodeFrame(map[string]any{"jsonrpc": "2.0", "id": 2, "method": "session.tools.handlePendingToolCall", "params": params})
				var out []byte
				ask := func(n int) {
					request := notification("bench.tools", w.params(n))
					request["id"] = 1
					out = append(out[:0], encodeFrame(request)...)
					for left := 2*n + 1; left > 0; left-- { // n calls, n answers to ours, and one in the end
						if len(out) > 0 && r.br.Buffered() == 0 {
							if _, err := rwc.Write(out); err != nil {
								b.Fatal(err)
							}
							out = out[:0]
						}
						if m := benchRead(b, r); m.event != nil {
							out = append(out, answer...)
						}
					}
				}
				ask(w.batch())
				benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
			})
		}
	})
}

// BenchmarkCreate is a session's create. Its limit is the request's params by encoding/json, and the round trip.
func BenchmarkCreate(b *testing.B) {
	benchTransports(b, func(b *testing.B, transport string) {
		b.Run("create", func(b *testing.B) {
			c := benchClient(b, transport)
			ctx := context.Background()
			benchMeasure(b, transport, func() {
				for range b.N {
					if _, err := c.CreateSession(ctx, nil); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
		b.Run("limit", func(b *testing.B) {
			rwc := benchDial(b, transport)
			r := newFrameReader(rwc, defaultMaxFrame)
			type params struct {
				SessionID                      string `json:"sessionId"`
				EnvValueMode                   string `json:"envValueMode"`
				ToolFilterPrecedence           string `json:"toolFilterPrecedence"`
				Hooks                          bool   `json:"hooks"`
				IncludeSubAgentStreamingEvents bool   `json:"includeSubAgentStreamingEvents"`
			}
			type request struct {
				Version string `json:"jsonrpc"`
				ID      int    `json:"id"`
				Method  string `json:"method"`
				Params  params `json:"params"`
			}
			benchMeasure(b, transport, func() {
				for i := range b.N {
					body, err := json.Marshal(request{"2.0", i, "session.create", params{newUUID(), "direct", "excluded", false, true}})
					if err != nil {
						b.Fatal(err)
					}
					if _, err = fmt.Fprintf(rwc, "Content-Length: %d\r\n\r\n%s", len(body), body); err != nil {
						b.Fatal(err)
					}
					benchRead(b, r)
				}
			})
		})
	})
	b.Run("prepare", func(b *testing.B) {
		c := benchClient(b, "pipe")
		benchMeasure(b, "pipe", func() {
			for range b.N {
				if _, err := c.PrepareSession(nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
}

// idleSessions opens n sessions and returns what one of them holds: bytes of heap, bytes of stacks, goroutines.
func idleSessions(t testing.TB, n int) (heap, stack, goroutines float64) {
	c := benchClient(t, "pipe")
	s := createSession(t, c, nil) // what the first one alone brings
	measure := func() (m runtime.MemStats, g int) {
		runtime.GC()
		runtime.GC() // pools are empty after the second
		runtime.ReadMemStats(&m)
		return m, runtime.NumGoroutine()
	}
	before, g := measure()
	for range n {
		if _, err := c.CreateSession(context.Background(), nil); err != nil {
			t.Fatal(err)
		}
	}
	after, h := measure()
	runtime.KeepAlive(s)
	per := func(after, before uint64) float64 { return (float64(after) - float64(before)) / float64(n) }
	return per(after.HeapAlloc, before.HeapAlloc), per(after.StackInuse, before.StackInuse), float64(h-g) / float64(n)
}

// BenchmarkIdle tells what an open session holds that nobody uses.
func BenchmarkIdle(b *testing.B) {
	var heap, stack, goroutines float64
	for range b.N {
		heap, stack, goroutines = idleSessions(b, 10_000)
	}
	b.ReportMetric(heap, "heap-B/session")
	b.ReportMetric(stack, "stack-B/session")
	b.ReportMetric(goroutines, "goroutines/session")
}

func TestIdleSessionHoldsLittle(t *testing.T) {
	heap, _, goroutines := idleSessions(t, 1000)
	if heap > 2048 || goroutines > 0 {
		t.Errorf("an idle session holds %.0f bytes and %v goroutines", heap, goroutines)
	}
}

func TestAllocations(t *testing.T) {
	c := benchClient(t, "pipe")
	ctx := context.Background()
	open := func(id string, cfg SessionConfig) *Session {
		cfg.SessionID = id
		return createSession(t, c, &cfg)
	}
	tool := Tool{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "done"}, nil }}
	open("s0", SessionConfig{Tools: []Tool{tool}})
	tools := benchWork{Kind: "tool", Size: 414, Sessions: 1, InFlight: 64}
	const batch = 64

	// event takes a frame the way the connection's reader does, which is idle, and lets each subscriber read it.
	frame := benchWork{Kind: "delta", Size: 414, Sessions: 1}.frames()[0]
	event := func(subscribers int, read func(e Event)) func() {
		id := newUUID()
		s := open(id, SessionConfig{})
		subs := make([]*Subscription[Event], subscribers)
		for i := range subs {
			subs[i] = s.Subscribe()
		}
		stream := &frameReader{br: bufio.NewReader(nil), max: defaultMaxFrame}
		frame := bytes.Replace(frame, []byte(`"s0"`), []byte(`"`+id+`"`), 1)
		body := frame[bytes.IndexByte(frame, '{'):]
		frame = append(fmt.Appendf(nil, "Content-Length: %d\r\n\r\n", len(body)), body...)
		in := bytes.NewReader(nil)
		var m message
		return func() {
			in.Reset(frame)
			stream.br.Reset(in)
			body, err := stream.next()
			if err != nil || !m.parse(body) {
				t.Fatal("no message: ", err)
			}
			c.dispatch(&m)
			for _, sub := range subs {
				e, err := sub.Next(ctx)
				if err != nil {
					t.Fatal(err)
				}
				read(e)
			}
		}
	}
	envelope := func(e Event) {}
	for _, tt := range []struct {
		name string
		most float64
		f    func()
	}{
		{"event", 4, event(1, envelope)},
		{"event to many", 4, event(100, envelope)},
		{"event with payload", 12, event(1, func(e Event) { e.Payload() })},
		{"call", 12, func() {
			if err := c.Call(ctx, "ping", nil, nil); err != nil {
				t.Fatal(err)
			}
		}},
		{"tools", 30 * batch, func() {
			if err := c.Call(ctx, "bench.tools", tools.params(batch), nil); err != nil {
				t.Fatal(err)
			}
		}},
		{"create", 60, func() { open("", SessionConfig{}) }},
	} {
		if got := testing.AllocsPerRun(100, tt.f); got > tt.most {
			t.Errorf("%s: %v allocations, at most %v are expected", tt.name, got, tt.most)
		}
	}
}

func TestLargeEventIsHeldOnce(t *testing.T) {
	const runs = 4
	frame := benchWork{Kind: "delta", Size: 1 << 20, Sessions: 1}.frames()[0]
	r := newFrameReader(bytes.NewReader(bytes.Repeat(frame, runs)), defaultMaxFrame)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range runs {
		var m message
		body, err := r.next()
		if err != nil || !m.parse(body) {
			t.Fatal("no message: ", err)
		}
		if e := newEvent(&m.fields, nil); len(e.Data) < 1<<19 {
			t.Fatalf("data of %d bytes", len(e.Data))
		}
	}
	runtime.ReadMemStats(&after)
	if got := (after.TotalAlloc - before.TotalAlloc) / runs; got > 12<<20/10 {
		t.Errorf("an event of 1 MB allocates %d bytes", got)
	}
}

// A call that is given up while the writer is busy with another frame leaves no trace on the wire.
func TestWithdrawnCallIsNotSent(t *testing.T) {
	leakCheck(t)
	near, far := net.Pipe()
	c := newConn(near, defaultMaxFrame, slog.New(discardHandler{}))
	c.handle, c.ended = func(*message) {}, func(error) {}
	c.start()
	defer func() {
		near.Close()
		await(t, "reader's end", c.readDone)
		await(t, "writer's end", c.writeDone)
	}()
	if err := c.reply([]byte("1"), nil, nil); err != nil { // the writer has it, and nobody reads
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var finished error
	given := async(func() error {
		_, err := c.call(ctx, &call{method: "never", then: func(_ json.RawMessage, err error) { finished = err }}, nil)
		return err
	})
	until(t, "queued", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.waiting) == 1
	})
	cancel()
	if err := await(t, "call", given); !errors.Is(err, context.Canceled) || finished != err {
		t.Errorf("got %v, then got %v", err, finished)
	}
	later := async(func() error { return c.reply([]byte("2"), nil, nil) })
	r := newFrameReader(far, defaultMaxFrame)
	for _, want := range []string{"1", "2"} {
		body, err := r.next()
		var m message
		if err != nil || !m.parse(body) || string(m.id) != want {
			t.Errorf("got %q, %v; want the answer to %s", body, err, want)
		}
	}
	if err := await(t, "reply", later); err != nil {
		t.Error(err)
	}
}
