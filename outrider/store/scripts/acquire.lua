-- ARGV: session TTL ms, owner, lease ms, '1' to take it by force.
local lease = redis.call('HMGET', KEYS[1], 'lease.fence', 'lease.owner', 'lease.expires_ms')
if not lease[1] then
  return {'NOT_FOUND'}
end
local fence = tonumber(lease[1])
if lease[2] ~= ARGV[2] then
  if lease[2] ~= '' and ARGV[4] ~= '1' and tonumber(lease[3]) > now_ms() then
    return {'HELD', lease[2]}
  end
  -- Counting up would give a number twice after a failover that lost a grant. The time does not, and is higher.
  fence = math.max(fence + 1, now_ms())
end
local reply = grant(ARGV[2], fence, ARGV[3])
refresh(ARGV[1])
return reply
