package copilot_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"copilot"
)

// The shortest program: start the CLI that is found, open a session, ask, and leave nothing behind.
func Example() {
	ctx := context.Background()
	client, err := copilot.Start(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Stop(ctx)

	session, err := client.CreateSession(ctx, &copilot.SessionConfig{OnPermission: copilot.ApproveAll})
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "What is in this directory?"})
	if err != nil {
		log.Print(err)
		return
	}
	if answer != nil { // an agent may have done its work without a word
		fmt.Println(answer.Content)
	}
}

// The other examples run against a scripted server: connect stands where a program calls Start.
func Example_quickStart() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	session, err := client.CreateSession(ctx, nil)
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "good morning"})
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(answer.Content)
	// Output: You said: good morning
}

// Ask sends a message and ranges over its turn. Who prefers gaps to an end goes on after a *LagError.
func ExampleSession_Ask() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{Streaming: true})
	if err != nil {
		log.Print(err)
		return
	}

	for event, err := range session.Ask(ctx, copilot.Message{Prompt: "good morning"}) {
		if err != nil {
			log.Print(err)
			return
		}
		switch p := event.Payload().(type) {
		case *copilot.AssistantMessageDelta:
			fmt.Print(p.DeltaContent)
		case *copilot.SessionIdle:
			fmt.Println()
		}
	}
	// Output: You said: good morning
}

// Events sees whatever happens in a session, whoever caused it, from its call on.
func ExampleSession_Events() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)
	session, err := client.CreateSession(ctx, nil)
	if err != nil {
		log.Print(err)
		return
	}

	events := session.Events(ctx)
	if _, err := session.Send(ctx, copilot.Message{Prompt: "good morning"}); err != nil {
		log.Print(err)
		return
	}
loop:
	for event, err := range events {
		if err != nil {
			log.Print(err)
			return
		}
		switch p := event.Payload().(type) {
		case *copilot.UserMessage:
			fmt.Println("user:", p.Content)
		case *copilot.AssistantMessage:
			fmt.Println("agent:", p.Content)
		case *copilot.SessionIdle:
			break loop
		}
	}
	// Output:
	// user: good morning
	// agent: You said: good morning
}

// A prepared session has its subscribers before its first event.
func ExampleClient_PrepareSession() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	prepared, err := client.PrepareSession(nil)
	if err != nil {
		log.Print(err)
		return
	}
	events := prepared.Subscribe()
	defer events.Close()
	if _, err := prepared.Start(ctx); err != nil {
		log.Print(err)
		return
	}
	first, err := events.Next(ctx)
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(first.Type)
	// Output: session.start
}

// A subscriber that is too slow for its ring is told how much it has missed, and goes on.
func ExampleLagError() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{EventBuffer: 2})
	if err != nil {
		log.Print(err)
		return
	}
	events := session.Subscribe()
	defer events.Close()
	if _, err := session.SendAndWait(ctx, copilot.Message{Prompt: "one two three four"}); err != nil {
		log.Print(err)
		return
	}

	for event, err := range events.All(ctx) {
		var lag *copilot.LagError
		if errors.As(err, &lag) {
			fmt.Println("missed some:", lag.Skipped > 0)
			continue
		} else if err != nil {
			log.Print(err)
			return
		}
		fmt.Println(event.Type)
		if event.Type == copilot.EventSessionIdle {
			break
		}
	}
	// Output:
	// missed some: true
	// assistant.message
	// session.idle
}

// A tool is a Go function; the schema of its arguments comes from their type.
func ExampleNewTool() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	type place struct {
		City string `json:"city" description:"name of the city"`
	}
	weather := copilot.NewTool("weather", "Tells the weather.", func(ctx context.Context, p place) (string, error) {
		return "rain in " + p.City, nil
	})
	weather.SkipPermission = true // else each call is a matter for OnPermission
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{Tools: []copilot.Tool{weather}})
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "Do I need an umbrella?"})
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(answer.Content)
	// Output: The host said: "rain in Paris"
}

// A policy decides what the agent may do. A refusal with feedback lets the agent go on another way.
func ExamplePermissionHandler() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	policy := func(ctx context.Context, r copilot.PermissionRequest) (copilot.PermissionDecision, error) {
		if r.Kind == copilot.PermissionRead {
			return copilot.ApproveOnce(), nil
		}
		return copilot.Reject("only reading is allowed here"), nil
	}
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{OnPermission: policy})
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "Clean up, please."})
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(answer.Content)
	// Output: The host said: {"feedback":"only reading is allowed here","kind":"reject"}
}

// A hook looks at each tool call before it is made.
func ExampleHooks() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	hooks := &copilot.Hooks{
		PreToolUse: func(ctx context.Context, in copilot.PreToolUseInput) (copilot.PreToolUseOutput, error) {
			if in.ToolName == "bash" && bytes.Contains(in.ToolArgs, []byte("sudo")) {
				return copilot.PreToolUseOutput{Decision: copilot.HookDeny, DecisionReason: "not as root"}, nil
			}
			return copilot.PreToolUseOutput{Decision: copilot.HookPass}, nil // as if there were no hook
		},
	}
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{Hooks: hooks})
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "Install it."})
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(answer.Content)
	// Output: The host said: {"output":{"permissionDecision":"deny","permissionDecisionReason":"not as root"}}
}

// The agent may ask the user. The context ends when nobody waits for the answer any more.
func ExampleUserInputRequest() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	ask := func(ctx context.Context, r copilot.UserInputRequest) (copilot.UserInputResponse, error) {
		fmt.Println(r.Question, r.Choices)
		return copilot.UserInputResponse{Answer: r.Choices[0]}, nil
	}
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{OnUserInput: ask})
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "Paint it."})
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(answer.Content)
	// Output:
	// Which colour? [red blue]
	// The host said: {"answer":"red","wasFreeform":false}
}

// Resume goes on with a stored session. Tools, handlers and credentials are not stored: they have to be given again.
func ExampleClient_ResumeSession() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	config := copilot.SessionConfig{OnPermission: copilot.ApproveAll}
	session, err := client.ResumeSession(ctx, "stored-session", &config)
	if errors.Is(err, copilot.ErrSessionNotFound) || errors.Is(err, copilot.ErrCannotResume) {
		session, err = client.CreateSession(ctx, &config) // start afresh
	}
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(session.ID())
	// Output: stored-session
}

// A host that was restarted while a tool ran answers the call now: it had kept the session's id and the call's RequestID.
func ExampleClient_PrepareResumeSession() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	prepared, err := client.PrepareResumeSession("stored-session", &copilot.SessionConfig{
		Tools:               []copilot.Tool{{Name: "weather", Description: "Tells the weather."}},
		ContinuePendingWork: true,
	})
	if err != nil {
		log.Print(err)
		return
	}
	events := prepared.Events(ctx)
	session, err := prepared.Start(ctx)
	if err != nil {
		log.Print(err)
		return
	}
	if err := session.AnswerToolCall(ctx, "stored-request", copilot.ToolResult{Text: "rain"}); err != nil {
		log.Print(err)
		return
	}
	for event, err := range events {
		if err != nil {
			log.Print(err)
			return
		}
		if m, ok := event.Payload().(*copilot.AssistantMessage); ok {
			fmt.Println(m.Content)
		}
		if event.Type == copilot.EventSessionIdle {
			break
		}
	}
	// Output: The host said: {"textResultForLlm":"rain"}
}

// A watch looks at a session that somebody else runs, from its beginning to its end.
func ExampleClient_WatchSharedSession() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	watch, err := client.WatchSharedSession(ctx, "their-session", nil)
	if err != nil {
		log.Print(err)
		return
	}
	defer watch.Close(ctx)
	fmt.Println("watching:", watch.Metadata().Name)
	for event, err := range watch.Events(ctx) {
		if errors.Is(err, copilot.ErrDisconnected) {
			fmt.Println("it has ended")
			break
		} else if err != nil {
			log.Print(err)
			return
		}
		if m, ok := event.Payload().(*copilot.AssistantMessage); ok {
			fmt.Println(m.Content)
		}
	}
	// Output:
	// watching: fix the build
	// The build is fixed.
	// it has ended
}

// A subscription to the lives of all sessions, taken before the first one begins, misses none.
func ExampleClient_SubscribeLifecycle() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	notices := client.SubscribeLifecycle()
	defer notices.Close()
	if _, err := client.CreateSession(ctx, &copilot.SessionConfig{SessionID: "mine"}); err != nil {
		log.Print(err)
		return
	}
	notice, err := notices.Next(ctx)
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(notice.Type, notice.SessionID)
	// Output: session.created mine
}

// A host that must not be kept waiting stops in order as long as it can, and by force after that.
func ExampleClient_Stop() {
	client := connect(context.Background(), nil)

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := client.Stop(ctx); err != nil {
		log.Print(err)
		client.ForceStop() // for what Stop could not confirm
	}
	<-client.Done()
	fmt.Println(errors.Is(client.Err(), copilot.ErrClosed))
	// Output: true
}

// A tool server serves its tools in a session that somebody else runs, at a CLI that listens on TCP, until that session ends.
func ExampleDial() {
	ctx := context.Background()
	client, err := copilot.Dial(ctx, listen(), &copilot.Options{ConnectionToken: os.Getenv("COPILOT_CONNECTION_TOKEN")})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Stop(ctx)

	type place struct {
		City string `json:"city"`
	}
	weather := copilot.NewTool("weather", "Tells the weather.", func(ctx context.Context, p place) (string, error) {
		fmt.Println("asked for", p.City)
		return "rain", nil
	})
	session, err := client.ResumeSession(ctx, "their-session", &copilot.SessionConfig{
		Streaming: true, // as the others want it: it counts for all
		Tools:     []copilot.Tool{weather},
	})
	if err != nil {
		log.Print(err)
		return
	}
	<-session.Context().Done()
	fmt.Println(context.Cause(session.Context()))
	// Output:
	// asked for Paris
	// copilot: session not found
}

// A model endpoint of your own needs no login. The key is in no error, log or printed value.
func ExampleProviderConfig() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)

	session, err := client.CreateSession(ctx, &copilot.SessionConfig{
		Model: "qwen3",
		Provider: &copilot.ProviderConfig{
			Type:    "openai",
			BaseURL: "http://localhost:11434/v1",
			APIKey:  os.Getenv("MODEL_API_KEY"),
		},
	})
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "good morning"})
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(answer.Content)
	// Output: qwen3 at http://localhost:11434/v1 said: good morning
}

// transport answers the runtime's model requests itself; one that forwards them ends with http.DefaultTransport.RoundTrip(r).
type transport struct{}

func (transport) RoundTrip(r *http.Request) (*http.Response, error) {
	fmt.Println(r.Method, r.URL.Path)
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("good morning")), Request: r}, nil
}

// All model traffic of the runtime goes through ModelTransport: to look at it, to route it, or to stand in for the model in a test.
func ExampleOptions_modelTransport() {
	ctx := context.Background()
	client := connect(ctx, &copilot.Options{ModelTransport: transport{}})
	defer client.Stop(ctx)

	session, err := client.CreateSession(ctx, nil)
	if err != nil {
		log.Print(err)
		return
	}
	answer, err := session.SendAndWait(ctx, copilot.Message{Prompt: "Say something."})
	if err != nil {
		log.Print(err)
		return
	}
	fmt.Println(answer.Content)
	// Output:
	// POST /v1/chat/completions
	// The model said: good morning
}

// A program that carries the CLI inside itself, below a line //go:embed copilot, installs and starts it.
func ExampleInstallCLI() {
	var embedded = []byte("#!/bin/sh\n") // the native executable, in fact

	ctx := context.Background()
	dir, err := os.MkdirTemp("", "copilot") // "" in place of dir is the user's cache
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path, err := copilot.InstallCLI(ctx, dir, bytes.NewReader(embedded))
	if err != nil {
		log.Print(err)
		return
	}
	options := &copilot.Options{CLI: path} // for Start
	fmt.Println(filepath.Dir(options.CLI) == dir)
	// Output: true
}

// Call reaches what has no method of its own.
func ExampleSession_Call() {
	ctx := context.Background()
	client := connect(ctx, nil)
	defer client.Stop(ctx)
	session, err := client.CreateSession(ctx, &copilot.SessionConfig{SessionID: "mine"})
	if err != nil {
		log.Print(err)
		return
	}

	var result struct {
		SessionID string `json:"sessionId"`
	}
	if err := session.Call(ctx, "session.metadata.snapshot", nil, &result); err != nil {
		log.Print(err)
		return
	}
	fmt.Println(result.SessionID)
	// Output: mine
}

// connect returns a client of a fresh server. A program that has the CLI calls copilot.Start instead.
func connect(ctx context.Context, options *copilot.Options) *copilot.Client {
	near, far := net.Pipe()
	go (&server{conn: far}).run() // ends when the client closes its end
	client, err := copilot.NewClient(ctx, near, options)
	if err != nil {
		log.Fatal(err)
	}
	return client
}

// listen returns the address of a fresh server that has one client in its life.
func listen() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go func() { // ends when that client does
		conn, err := l.Accept()
		l.Close()
		if err == nil {
			(&server{conn: conn}).run()
		}
	}()
	return l.Addr().String()
}

// server plays the Copilot CLI. What it does with a prompt depends on what its client can do: it asks for that first, and answers with
// what it was told.
type server struct {
	conn   net.Conn
	sent   int     // messages of the user
	asked  int     // requests of its own
	host   message // which created or resumed the session
	models bool    // the client serves model requests
}

// message is a request, or the answer to one. Params are those members of all requests that the server looks at.
type message struct {
	ID     json.RawMessage
	Method string
	Params struct {
		SessionID string
		Prompt    string
		Result    json.RawMessage
		Data      string

		Model               string
		Provider            struct{ BaseURL string }
		Tools               []struct{ Name string }
		RequestPermission   bool
		RequestUserInput    bool
		Hooks               bool
		ContinuePendingWork bool
	}
	Result json.RawMessage
}

type object map[string]any

func (s *server) run() {
	defer s.conn.Close()
	r := textproto.NewReader(bufio.NewReader(s.conn))
	for {
		header, err := r.ReadMIMEHeader()
		if err != nil {
			return
		}
		length, err := strconv.ParseInt(header.Get("Content-Length"), 10, 64)
		if err != nil {
			return
		}
		var m message
		if err := json.NewDecoder(io.LimitReader(r.R, length)).Decode(&m); err != nil {
			return
		}
		if m.Method != "" {
			s.serve(m)
		} else if string(m.Result) != "{}" { // which has nothing to tell
			s.say(s.host.Params.SessionID, "The host said: "+string(m.Result))
		}
	}
}

func (s *server) serve(m message) {
	id := m.Params.SessionID
	result := object{"sessionId": id, "success": true, "accepted": true}
	switch m.Method {
	case "connect":
		result = object{"ok": true, "protocolVersion": copilot.MaxProtocolVersion, "version": "1.0.102"}
	case "llmInference.setProvider":
		s.models = true
	case "session.create", "session.resume":
		s.host = m
	case "sessions.watch":
		result = object{"sessionId": id, "readOnly": true, "metadata": object{"name": "fix the build"}}
	case "session.send":
		s.sent++
		result["messageId"] = fmt.Sprint("message-", s.sent)
	}
	s.write(object{"id": m.ID, "result": result})

	switch m.Method {
	case "session.create":
		s.event(id, "session.start", object{"sessionId": id, "copilotVersion": "1.0.102"})
		s.lifecycle(id, "session.created")
	case "session.resume":
		s.event(id, "session.resume", object{})
		if len(m.Params.Tools) > 0 && !m.Params.ContinuePendingWork { // somebody else's turn needs a tool
			s.work(m)
		}
	case "session.send":
		s.event(id, "user.message", object{"messageId": result["messageId"], "content": m.Params.Prompt})
		s.work(m)
	case "session.tools.handlePendingToolCall", "session.permissions.handlePendingPermissionRequest":
		s.say(id, "The host said: "+string(m.Params.Result))
		if s.sent == 0 && !s.host.Params.ContinuePendingWork {
			s.lifecycle(id, "session.deleted")
		}
	case "llmInference.httpResponseChunk":
		if text, err := base64.StdEncoding.DecodeString(m.Params.Data); err == nil && len(text) > 0 {
			s.say(s.host.Params.SessionID, "The model said: "+string(text))
		}
	case "sessions.watch":
		s.say(id, "The build is fixed.")
		s.lifecycle(id, "session.disconnected")
	}
}

// work begins a turn, and ends it where nobody needs to be asked.
func (s *server) work(m message) {
	id, host := m.Params.SessionID, s.host.Params
	switch {
	case len(host.Tools) > 0:
		s.event(id, "external_tool.requested", object{"requestId": "r", "toolCallId": "c", "toolName": host.Tools[0].Name,
			"arguments": object{"city": "Paris"}})
	case host.RequestPermission:
		s.event(id, "permission.requested", object{"requestId": "r", "permissionRequest": object{
			"kind": "shell", "fullCommandText": "rm -r /", "intention": "clean up"}})
	case host.Hooks:
		s.request("hooks.invoke", object{"sessionId": id, "hookType": "preToolUse", "input": object{
			"toolName": "bash", "toolArgs": object{"command": "sudo make install"}}})
	case host.RequestUserInput:
		s.request("userInput.request", object{"sessionId": id, "question": "Which colour?", "choices": []string{"red", "blue"}})
	case s.models:
		s.request("llmInference.httpRequestStart", object{"requestId": "r", "sessionId": id, "method": "POST",
			"url": "https://models.example/v1/chat/completions", "headers": object{}})
		s.request("llmInference.httpRequestChunk", object{"requestId": "r", "data": "{}", "end": true})
	case host.Provider.BaseURL != "":
		s.say(id, host.Model+" at "+host.Provider.BaseURL+" said: "+m.Params.Prompt)
	default:
		s.say(id, "You said: "+m.Params.Prompt)
	}
}

// say ends a turn with a text.
func (s *server) say(session, text string) {
	for _, word := range strings.SplitAfter(text, " ") {
		s.event(session, "assistant.message_delta", object{"deltaContent": word})
	}
	s.event(session, "assistant.message", object{"content": text})
	s.event(session, "session.idle", object{})
}

func (s *server) event(session, kind string, data object) {
	event := object{"id": "e", "type": kind, "timestamp": "2026-01-02T03:04:05Z", "data": data}
	s.write(object{"method": "session.event", "params": object{"sessionId": session, "event": event}})
}

func (s *server) lifecycle(session, kind string) {
	s.write(object{"method": "session.lifecycle", "params": object{"type": kind, "sessionId": session}})
}

func (s *server) request(method string, params object) {
	s.asked++
	s.write(object{"id": s.asked, "method": method, "params": params})
}

func (s *server) write(m object) {
	m["jsonrpc"] = "2.0"
	body, err := json.Marshal(m)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Fprintf(s.conn, "Content-Length: %d\r\n\r\n%s", len(body), body) // where this fails, so does the next read
}
