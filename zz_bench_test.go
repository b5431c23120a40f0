package copilot

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
)

// feed is a connection whose peer has n copies of a frame to send, and answers the handshake first.
type feed struct {
	frame []byte
	head  bytes.Buffer
	left  int
	rest  []byte
	begin chan struct{}
	end   chan struct{}
}

func newFeed(frame []byte, n int) *feed {
	f := &feed{frame: frame, left: n, begin: make(chan struct{}), end: make(chan struct{})}
	return f
}

func (f *feed) Read(b []byte) (int, error) {
	<-f.begin
	n := 0
	for n < len(b) {
		if len(f.rest) == 0 {
			if f.left == 0 {
				break
			}
			f.left--
			f.rest = f.frame
		}
		k := copy(b[n:], f.rest)
		f.rest = f.rest[k:]
		n += k
	}
	if n == 0 {
		<-f.end
		return 0, io.EOF
	}
	return n, nil
}

func (f *feed) Write(b []byte) (int, error) { return len(b), nil }
func (f *feed) Close() error                { return nil }

// deltaFrame is an assistant.message_delta whose body has the given size.
func deltaFrame(session string, size int) []byte {
	event := func(text string) []byte {
		return encodeFrame(notification("session.event", map[string]any{"sessionId": session, "event": map[string]any{
			"type": "assistant.message_delta", "id": newUUID(), "parentId": newUUID(), "timestamp": "2026-01-02T03:04:05.678Z", "ephemeral": true,
			"data": map[string]any{"messageId": newUUID(), "deltaContent": text}}}))
	}
	return event(strings.Repeat("x", max(1, size-len(event("")))))
}

func BenchmarkEvent(b *testing.B) {
	for _, size := range []int{440, 1 << 10, 64 << 10, 1 << 20} {
		frame := deltaFrame("s", size)
		b.Run(fmt.Sprintf("size=%d", len(frame)), func(b *testing.B) {
			b.Run("envelope", func(b *testing.B) { benchmarkEvent(b, frame, 1, false) })
			b.Run("payload", func(b *testing.B) { benchmarkEvent(b, frame, 1, true) })
			b.Run("limit", func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(frame)))
				f := newFeed(frame, b.N)
				close(f.begin)
				r := newFrameReader(f, defaultMaxFrame)
				var m message
				for i := 0; i < b.N; i++ {
					body, err := r.next()
					if err != nil || !m.parse(body) {
						b.Fatal(err)
					}
				}
			})
			b.Run("json", func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(frame)))
				f := newFeed(frame, b.N)
				close(f.begin)
				r := newFrameReader(f, defaultMaxFrame)
				for i := 0; i < b.N; i++ {
					body, _ := r.next()
					if !json.Valid(body) {
						b.Fatal()
					}
				}
			})
		})
	}
	frame := deltaFrame("s", 440)
	for _, subs := range []int{1, 10, 100, 1000} {
		b.Run(fmt.Sprintf("subscribers=%d", subs), func(b *testing.B) { benchmarkEvent(b, frame, subs, false) })
	}
}

func benchmarkEvent(b *testing.B, frame []byte, subs int, payload bool) {
	b.ReportAllocs()
	b.SetBytes(int64(len(frame)))
	f := newFeed(frame, b.N)
	o, _ := (*Options)(nil).checked()
	c := newClient(o, f, nil, "feed")
	s := newSession(c, "s", startCreate, &SessionConfig{})
	s.live, s.phase = true, open
	c.routes["s"] = route{session: s}
	done := make(chan uint64)
	for i := 0; i < subs; i++ {
		sub := s.Subscribe()
		go func() {
			var seen uint64
			ctx := context.Background()
			for seen < uint64(b.N) {
				e, err := sub.Next(ctx)
				if lag, ok := err.(*LagError); ok {
					seen += lag.Skipped
					continue
				}
				if payload && e.Payload().(*AssistantMessageDelta).DeltaContent == "" {
					b.Error("empty")
				}
				seen++
			}
			done <- seen
		}()
	}
	b.ResetTimer()
	close(f.begin)
	for i := 0; i < subs; i++ {
		<-done
	}
	b.StopTimer()
	close(f.end)
	c.ForceStop()
}

// echoServer answers every request with the same small result, over a pipe of the operating system.
func echoServer(b *testing.B) *Client {
	inR, inW, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	go func() { // ends when the client closes its end
		r := newFrameReader(inR, defaultMaxFrame)
		var m message
		var out []byte
		for {
			body, err := r.next()
			if err != nil {
				outW.Close()
				return
			}
			m.parse(body)
			result := `{"message":"pong","protocolVersion":3}`
			out = out[:0]
			out = fmt.Appendf(out, "Content-Length: %d\r\n\r\n{\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":%s}", len(result)+len(m.id)+len(`{"jsonrpc":"2.0","id":,"result":}`), m.id, result)
			if _, err := outW.Write(out); err != nil {
				return
			}
		}
	}()
	c, err := NewClient(context.Background(), &stdioPipes{outR, inW}, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Stop(context.Background()) })
	return c
}

func BenchmarkCall(b *testing.B) {
	for _, callers := range []int{1, 256} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			c := echoServer(b)
			b.ReportAllocs()
			b.SetParallelism(max(1, callers/2))
			b.ResetTimer()
			if callers == 1 {
				for i := 0; i < b.N; i++ {
					if err := c.Call(context.Background(), "ping", nil, nil); err != nil {
						b.Fatal(err)
					}
				}
				return
			}
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := c.Call(context.Background(), "ping", nil, nil); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}

func BenchmarkCreateSession(b *testing.B) {
	near, far := net.Pipe()
	p := startPeer(b, far)
	c, err := NewClient(context.Background(), near, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer c.ForceStop()
	_ = p
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		prepared, err := c.PrepareSession(nil)
		if err != nil {
			b.Fatal(err)
		}
		_ = prepared
	}
}
